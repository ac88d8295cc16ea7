"""Swin Transformer that ends in class attention, so that TransMix can be used with it.

TransMix: Attend to Mix for Vision Transformers (CVPR 2022, https://arxiv.org/abs/2111.09833),
section 4.5, replaces Swin's last block by a cheaper block of class attention. Its code and sizes
were never released. The block here is CaiT's (ICCV 2021, https://arxiv.org/abs/2103.17239,
section 3) with the heads and the MLP ratio of the block it replaces; no number can be compared.
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Pooled, init_linear
from tlalign_mm.backbones.swin import ARCHITECTURES as SWIN_ARCHITECTURES
from tlalign_mm.backbones.swin import SwinTransformer
from tlalign_mm.layers import ClassAttentionBlock, read_class
from tlalign_mm.registry import MODELS

ARCHITECTURES = {
    f"ca-{name}": SWIN_ARCHITECTURES[name] for name in ("swin-tiny", "swin-small", "swin-base")
}


@MODELS.register_module()
class CASwinTransformer(SwinTransformer):
    """Swin Transformer with a class token in place of the last block and of the pooling.

    The class token joins the tokens of the last map, attends to all of them (no windows), and is
    what the classifier sees. Dense models have neither token nor block: they are a Swin whose last
    stage is one block shorter. A Swin file loads into both; its last block is dropped.

    Args:
        arch: One of ``ca-swin-tiny``, ``ca-swin-small``, ``ca-swin-base``; fields that are given
            win over it.
        init_values: What the scales of the class-attention block start with; the default is CaiT's
            for 24 blocks, as many as the deepest model here has.
        **fields: Those of ``SwinTransformer``. ``depths`` counts the class-attention block as the
            last one of the last stage. ``drop_path_rate`` is reached at the last window block; the
            class-attention block has no stochastic depth, as in CaiT.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    initial_keys = (*SwinTransformer.initial_keys, r"cls_token", r"class_block\..*")
    architectures = ARCHITECTURES
    has_class_token = True

    def __init__(self, arch: str | None = None, init_values: float = 1e-5, **fields: Any) -> None:
        super().__init__(arch, **fields)
        sizes = self.architecture
        last_stage, last_block = len(sizes["depths"]) - 1, sizes["depths"][-1] - 1
        self.dropped_keys += (rf"layers\.{last_stage}\.blocks\.{last_block}\..*",)
        if self.out_indices:
            self.dropped_keys += (r"cls_token", r"class_block\..*")
            return
        dim = self.num_features[-1]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        trunc_normal_(self.cls_token, std=0.02)
        self.class_block = ClassAttentionBlock(
            dim,
            sizes["num_heads"][-1],
            sizes["mlp_ratio"],
            init_values=init_values,
            norm_eps=1e-5,  # Swin's
        ).apply(init_linear)
        self.freeze()

    def _window_blocks(self, depths: list[int]) -> list[int]:
        """One less in the last stage."""
        if depths[-1] < 1:
            raise ValueError(f"depths={depths} must end in at least 1, the class-attention block.")
        return [*depths[:-1], depths[-1] - 1]

    def _pool(self, x: Tensor, token_labels: Tensor | None, class_attention: bool) -> Pooled:
        """The class token, for features and labels alike."""
        grid = (x.shape[1], x.shape[2])
        if token_labels is not None:
            token_labels = token_labels.flatten(1, 2)
        x, token_labels, row = read_class(
            self.cls_token,
            [self.class_block],
            x.flatten(1, 2),
            token_labels,
            class_attention,
            self.with_cp,
        )
        row = None if row is None else row.unflatten(1, grid)
        return Pooled(self.norm(x), token_labels, row)

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each stage; the class-attention block is part of the last."""
        stages = super().stage_modules()
        if hasattr(self, "class_block"):
            stages[-1].append(self.class_block)
        return stages

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """The class token belongs to the patch embedding."""
        embedding, *stages = super().stage_parameters()
        if hasattr(self, "cls_token"):
            embedding.append(self.cls_token)
        return [embedding, *stages]

    def _num_blocks(self) -> int:
        return super()._num_blocks() - bool(self.out_indices)

    def _depth_of(self, parts: list[str]) -> int | None:
        extra = {"cls_token": 0, "class_block": self._num_blocks()}
        return extra[parts[0]] if parts[0] in extra else super()._depth_of(parts)

    def _check_architecture(self, theirs: dict[str, Any], source: str, strict: bool) -> None:
        """A Swin file fits as well, and so does one that is a block shorter: ours without class."""
        if theirs["type"] == SwinTransformer.__name__:
            depths = theirs["depths"]
            if depths[-1] == self.architecture["depths"][-1] - 1:
                depths = [*depths[:-1], depths[-1] + 1]
            theirs = {**theirs, "type": type(self).__name__, "depths": depths}
        super()._check_architecture(theirs, source, strict)
