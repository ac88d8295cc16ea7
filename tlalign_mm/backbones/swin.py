"""Swin Transformer with the label stream.

Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (ICCV 2021,
https://arxiv.org/abs/2103.14030). Parameter names are timm's (>= 0.9), so a timm state dict loads
by name, classifier aside.
"""

from typing import Any

import torch
import torch.utils.checkpoint as gradient_checkpoint
from timm.layers import PatchEmbed, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled
from tlalign_mm.labels import stream
from tlalign_mm.layers import PatchMerging, SwinBlock
from tlalign_mm.registry import MODELS

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "swin-tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "swin-small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "swin-base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
    "swin-large": {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)},
}


class SwinStage(nn.Module):
    """Patch merging (but for the first stage), then blocks of alternating shift."""

    def __init__(
        self,
        dim: int,
        merge: bool,
        num_heads: int,
        window_size: int,
        mlp_ratio: float,
        drop_path: list[float],
        always_shift: bool,
        with_cp: bool,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.downsample = PatchMerging(dim // 2) if merge else None
        self.blocks = nn.ModuleList(
            SwinBlock(
                dim, num_heads, window_size, window_size // 2 * (i % 2), mlp_ratio, p, always_shift
            )
            for i, p in enumerate(drop_path)
        )

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels through the stage."""
        if self.downsample is not None:
            x, token_labels = self.downsample(x, token_labels)
        for block in self.blocks:
            if self.with_cp and self.training:
                x, token_labels = gradient_checkpoint.checkpoint(
                    block, x, token_labels, use_reentrant=False
                )
            else:
                x, token_labels = block(x, token_labels)
        return x, token_labels


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
        sizes = _resolve(arch, embed_dim=embed_dim, depths=depths, num_heads=num_heads)
        embed_dim, depths, num_heads = sizes["embed_dim"], sizes["depths"], sizes["num_heads"]
        architecture = {**sizes, "window_size": window_size, "patch_size": patch_size}
        architecture["mlp_ratio"] = mlp_ratio
        super().__init__(architecture, frozen_stages, init_cfg)
        out_indices = tuple(range(len(depths)) if out_indices is None else out_indices)
        _check(embed_dim, depths, num_heads, out_indices)
        self.patch_size = patch_size
        self.out_indices = out_indices
        self.num_features = [embed_dim * 2**i for i in range(len(depths))]
        self.patch_embed = PatchEmbed(
            None, patch_size, 3, embed_dim, nn.LayerNorm, output_fmt="NHWC", dynamic_img_pad=True
        )
        rates = torch.linspace(0, drop_path_rate, sum(depths)).split(depths)
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
            for i, dim in enumerate(self.num_features)
        )
        for i in self.out_indices:
            self.add_module(f"norm{i}", nn.LayerNorm(self.num_features[i]))
        if not self.out_indices:
            self.norm = nn.LayerNorm(self.num_features[-1])
        self.apply(_init_linear)
        self.freeze()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Compute the maps of dense tasks.

        Args:
            images: (B, 3, H, W), any size from one patch up.

        Returns:
            Contiguous (B, C, H', W') maps at ``out_indices``, at strides 4, 8, 16, 32 for
            patches of 4.
        """
        x, maps = self.patch_embed(images), []
        for i, stage in enumerate(self.layers):
            x, _ = stage(x)
            if i in self.out_indices:
                normed = getattr(self, f"norm{i}")(x)
                maps.append(normed.permute(0, 3, 1, 2).contiguous())  # (B, C, H', W')
        return tuple(maps)

    def forward_features(self, images: Tensor, token_labels: Tensor | None = None) -> Pooled:
        """Pool the image for classification, and its labels by the same path.

        Args:
            images: (B, 3, H, W)
            token_labels: (B, N, K) on the patch grid, row-major, or None.

        Raises:
            ValueError: If the labels do not fit the patch grid, or the model was built for dense
                tasks (``out_indices`` not empty).
        """
        if self.out_indices:
            raise ValueError(
                "SwinTransformer pools only when built with out_indices=(); it has "
                f"out_indices={self.out_indices}."
            )
        x = self.patch_embed(images)  # (B, H, W, C)
        if token_labels is not None:
            token_labels = _to_map(token_labels, (x.shape[1], x.shape[2]))
        for stage in self.layers:
            x, token_labels = stage(x, token_labels)
        features = self.norm(x).mean(dim=(1, 2))
        return Pooled(features, None if token_labels is None else stream.pool(token_labels))

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each stage with its output norm."""
        stages = [[stage] for stage in self.layers]
        for i in self.out_indices:
            stages[i].append(getattr(self, f"norm{i}"))
        return [[self.patch_embed], *stages]

    def get_layer_depth(self, name: str, prefix: str = "") -> tuple[int, int]:
        """Place of a parameter for layer-wise learning-rate decay.

        Args:
            name: Name of the parameter.
            prefix: What stands before the backbone's own names (``backbone.``).

        Returns:
            Its depth and the number of depths: 0 the patch embedding, then a depth a block (patch
            merging goes with the block before it), last whatever follows, outside too.
        """
        depths = self.architecture["depths"]
        last = sum(depths) + 1
        parts = name.removeprefix(prefix).split(".")
        if not name.startswith(prefix) or parts[0] not in ("patch_embed", "layers"):
            return last, last + 1
        if parts[0] == "patch_embed":
            return 0, last + 1
        before = sum(depths[: int(parts[1])])
        return before + (int(parts[3]) + 1 if parts[2] == "blocks" else 0), last + 1

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed: bias tables, biases and norms."""
        return {name for name, p in self.named_parameters() if p.ndim == 1 or "bias_table" in name}


def _resolve(arch: str | None, **fields: Any) -> dict[str, Any]:
    """Sizes of ``arch`` with the given fields on top."""
    if arch is not None and arch not in ARCHITECTURES:
        raise ValueError(f"arch={arch!r} is unknown; choose one of {', '.join(ARCHITECTURES)}.")
    given = {key: value for key, value in fields.items() if value is not None}
    sizes = {**ARCHITECTURES.get(arch, {}), **given}
    absent = [key for key in fields if key not in sizes]
    if absent:
        raise ValueError(f"SwinTransformer needs arch=… or the fields {', '.join(absent)}.")
    return {key: list(v) if isinstance(v, list | tuple) else v for key, v in sizes.items()}


def _check(
    embed_dim: int, depths: list[int], num_heads: list[int], out_indices: tuple[int, ...]
) -> None:
    if len(depths) != len(num_heads):
        raise ValueError(f"depths={depths} and num_heads={num_heads} must have one entry a stage.")
    for i, heads in enumerate(num_heads):
        if embed_dim * 2**i % heads:
            raise ValueError(f"num_heads[{i}]={heads} must divide {embed_dim * 2**i} channels.")
    outside = [i for i in out_indices if i not in range(len(depths))]
    if outside:
        raise ValueError(f"out_indices={out_indices} must lie in 0 … {len(depths) - 1}.")


def _to_map(token_labels: Tensor, size: tuple[int, int]) -> Tensor:
    if token_labels.shape[1] != size[0] * size[1]:
        raise ValueError(
            f"token_labels hold {token_labels.shape[1]} tokens, but the image has {size[0]}x"
            f"{size[1]} patches; make them with the backbone's patch_size."
        )
    return token_labels.unflatten(1, size)  # (B, H, W, K)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            torch.nn.init.zeros_(module.bias)
