"""A backbone with a linear classifier, trained on mixed images."""

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones import Pooled
from tlalign_mm.labels import (
    MixParams,
    area_labels,
    class_targets,
    smoothed_one_hot,
    token_labels,
    transmix_labels,
)
from tlalign_mm.registry import MODELS

TARGETS = ("area", "transmix", "tl_align")


@MODELS.register_module()
class ImageClassifier(BaseModel):
    """Classifier whose target for a mixed image is chosen by ``target``.

    Args:
        backbone: Config of a backbone with ``forward_features``.
        num_classes: Number of classes.
        target: ``area``: the shares of the image's area (plain CutMix); ``transmix``: half of it
            replaced by the share of class attention (needs a backbone with a class token);
            ``tl_align``: the label that token alignment carries to the pooled features.
        label_smoothing: Mass spread evenly over all classes.
        data_preprocessor: Config of the data preprocessor.
        init_cfg: As in mmengine.

    Raises:
        ValueError: If ``target`` is unknown, or is ``transmix`` for a backbone without class token.
    """

    def __init__(
        self,
        backbone: dict,
        num_classes: int,
        target: str = "tl_align",
        label_smoothing: float = 0.1,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        if target not in TARGETS:
            raise ValueError(f"target={target!r} is unknown; choose one of {', '.join(TARGETS)}.")
        self.target = target
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes
        self.backbone = MODELS.build(backbone)
        if target == "transmix" and not self.backbone.has_class_token:
            raise ValueError(
                f"target='transmix' needs a class token, which {type(self.backbone).__name__} has "
                "not; choose another target or another backbone."
            )
        self.head = nn.Linear(self.backbone.num_features[-1], num_classes)
        trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        mix: MixParams | None = None,
        mode: str = "tensor",
    ) -> dict[str, Tensor] | list[dict[str, Tensor]] | Tensor:
        """Compute the loss, the predictions or the logits.

        Args:
            inputs: (B, 3, H, W) images, mixed and normalised.
            labels: (B,) class indices of the images before mixing.
            mix: How the images were mixed, or None.
            mode: ``loss``, ``predict`` (a dict of ``scores`` (classes,) and ``label`` for each
                image) or ``tensor`` (logits (B, classes)).
        """
        if mode == "loss":
            return self._loss(inputs, labels, mix)
        logits = self.head(self.backbone.forward_features(inputs).features)
        if mode == "tensor":
            return logits
        scores = logits.softmax(dim=1)
        return [{"scores": s, "label": y} for s, y in zip(scores, labels, strict=True)]

    def _loss(self, inputs: Tensor, labels: Tensor, mix: MixParams | None) -> dict[str, Tensor]:
        targets = smoothed_one_hot(labels, self.num_classes, self.label_smoothing)
        if mix is None:
            logits = self.head(self.backbone.forward_features(inputs).features)
            return {"loss": F.cross_entropy(logits.float(), targets)}
        aligned = self.target == "tl_align"
        token = token_labels(mix, self.backbone.patch_size) if aligned else None
        pooled = self.backbone.forward_features(inputs, token, self.target == "transmix")
        area, mix_labels = area_labels(mix), self._mix_labels(pooled, mix)
        targets = class_targets(mix_labels, targets, mix.partner)
        losses = {"loss": F.cross_entropy(self.head(pooled.features).float(), targets)}
        with torch.no_grad():  # logged beside the loss; no key here holds "loss", so none is added
            losses["lam_area"] = area[:, 0].mean()
            losses["lam_target"] = mix_labels[:, 0].mean()
            losses["lam_rmse"] = (mix_labels - area)[:, 0].square().mean().sqrt()
        return losses

    def _mix_labels(self, pooled: Pooled, mix: MixParams) -> Tensor:
        """(B, 2) shares of own image and partner that the target is made of."""
        if self.target == "tl_align":
            return pooled.token_labels
        if self.target == "transmix":
            return transmix_labels(pooled.class_attention, mix, self.backbone.stride)
        return area_labels(mix)
