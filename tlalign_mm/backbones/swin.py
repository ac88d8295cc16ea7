"""Swin Transformer with the label stream.

Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (ICCV 2021,
https://arxiv.org/abs/2103.14030). Parameter names are timm's (>= 0.9), so a timm state dict loads
by name, classifier aside.
"""

from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, check_stages, resolve
from tlalign_mm.labels import stream
from tlalign_mm.layers import SwinStage
from tlalign_mm.registry import MODELS

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "swin-tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "swin-small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "swin-base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
    "swin-large": {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)},
}


@MODELS.register_module()
class SwinTransformer(Backbone):
    """Swin Transformer for pretraining and for dense tasks.

    Args:
        arch: One of ``swin-tiny``, ``swin-small``, ``swin-base``, ``swin-large``; fields that are
            given win over it.
        embed_dim: Channels of the first stage; each stage doubles them.
        depths: Blocks of each stage.
        num_heads: Attention heads of each stage.
        window_size: Side of a window in tokens.
        patch_size: Side of a patch in pixels.
        mlp_ratio: Hidden channels of the MLP over its channels.
        drop_path_rate: Stochastic depth of the last block; linear from 0 over all blocks.
        always_shift: Shift also where the map fits in one window, as mmsegmentation's and
            mmdetection's Swin do; needed for parity with weights trained there.
        out_indices: Stages whose maps ``forward`` returns, each with a norm of its own (default:
            all); ``()`` for pretraining, which has the one final norm instead.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i stages as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    # Files of dense models and of pretraining differ in their norms; timm files hold the head, and
    # files of old versions the two buffers.
    dropped_keys = (
        r"norm\.(weight|bias)",
        r"norm\d\.(weight|bias)",
        r"head\..*",
        r".*\.attn_mask",
        r".*\.relative_position_index",
    )
    initial_keys = (r"norm\d?\.(weight|bias)",)
    architectures = ARCHITECTURES

    def __init__(
        self,
        arch: str | None = None,
        embed_dim: int | None = None,
        depths: tuple[int, ...] | None = None,
        num_heads: tuple[int, ...] | None = None,
        window_size: int = 7,
        patch_size: int = 4,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.1,
        always_shift: bool = False,
        out_indices: tuple[int, ...] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        sizes = resolve(
            type(self).__name__,
            self.architectures,
            arch,
            embed_dim=embed_dim,
            depths=depths,
            num_heads=num_heads,
        )
        depths, num_heads = sizes["depths"], sizes["num_heads"]
        check_stages(depths=depths, num_heads=num_heads)
        dims = [sizes["embed_dim"] * 2**i for i in range(len(depths))]
        check_heads(dims, num_heads)
        architecture = {
            **sizes,
            "window_size": window_size,
            "patch_size": patch_size,
            "mlp_ratio": mlp_ratio,
        }
        stride = patch_size * 2 ** (len(depths) - 1)
        out_indices = tuple(range(len(depths)) if out_indices is None else out_indices)
        super().__init__(
            architecture, dims, patch_size, stride, out_indices, frozen_stages, with_cp, init_cfg
        )
        self.patch_embed = PatchEmbed(
            None, patch_size, 3, dims[0], nn.LayerNorm, output_fmt="NHWC", dynamic_img_pad=True
        )
        depths = self._window_blocks(depths)
        # torch.device("meta") would leave the rates without values
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").split(depths)
        self.layers = nn.ModuleList(
            SwinStage(
                dim,
                i > 0,
                num_heads[i],
                window_size,
                mlp_ratio,
                rates[i].tolist(),
                always_shift,
                with_cp,
            )
            for i, dim in enumerate(dims)
        )
        for i in self.out_indices:
            self.add_module(f"norm{i}", nn.LayerNorm(dims[i]))
        if not self.out_indices:
            self.norm = nn.LayerNorm(dims[-1])
        self.apply(init_linear)
        self.freeze()

    def _window_blocks(self, depths: list[int]) -> list[int]:
        """Blocks of window attention in each stage."""
        return depths

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x, maps = self.patch_embed(images), []  # (B, H, W, C)
        for i, stage in enumerate(self.layers[: self.num_reached]):
            x, token_labels = stage(x, token_labels)
            if i in self.out_indices:
                maps.append(to_nchw(getattr(self, f"norm{i}")(x)))
        if self.out_indices:
            return maps, None
        return maps, self._pool(x, token_labels, class_attention)

    def _pool(self, x: Tensor, token_labels: Tensor | None, class_attention: bool) -> Pooled:
        """The mean over all tokens, for features and labels alike."""
        features = self.norm(x).mean(dim=(1, 2))
        return Pooled(features, None if token_labels is None else stream.pool(token_labels))

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each stage with its output norm."""
        stages = [[stage] for stage in self.layers]
        for i in self.out_indices:
            stages[i].append(getattr(self, f"norm{i}"))
        return [[self.patch_embed], *stages]

    def _num_blocks(self) -> int:
        return sum(self.architecture["depths"])

    def _depth_of(self, parts: list[str]) -> int | None:
        if parts[0] == "patch_embed":
            return 0
        if parts[0] != "layers":
            return None
        before = sum(self.architecture["depths"][: int(parts[1])])
        return before + (int(parts[3]) + 1 if parts[2] == "blocks" else 0)
