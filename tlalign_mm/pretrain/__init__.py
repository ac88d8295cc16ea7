"""Everything an mmengine Runner needs to pretrain a backbone with mixed labels."""

from tlalign_mm.pretrain.classifier import ImageClassifier
from tlalign_mm.pretrain.data_preprocessor import MixDataPreprocessor
from tlalign_mm.pretrain.datasets import ImageFolder
from tlalign_mm.pretrain.metrics import TopKAccuracy
from tlalign_mm.pretrain.mixers import CutMix

__all__ = ["CutMix", "ImageClassifier", "ImageFolder", "MixDataPreprocessor", "TopKAccuracy"]
