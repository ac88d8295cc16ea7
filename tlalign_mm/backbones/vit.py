"""Vision transformer (DeiT) with the label stream.

An Image is Worth 16x16 Words (ICLR 2021, https://arxiv.org/abs/2010.11929); Training data-efficient
image transformers (ICML 2021, https://arxiv.org/abs/2012.12877) for the sizes and the distillation
token. Parameter names are timm's, so a timm state dict loads by name, classifiers aside.
"""

from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed, to_2tuple, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, resolve
from tlalign_mm.labels import stream
from tlalign_mm.layers import Attention, Block, run_block
from tlalign_mm.layers.pos_embed import fit_pos_embed, resize_pos_embed
from tlalign_mm.registry import MODELS

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deit-tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3, "distilled": False},
    "deit-small": {"embed_dim": 384, "depth": 12, "num_heads": 6, "distilled": False},
    "deit-base": {"embed_dim": 768, "depth": 12, "num_heads": 12, "distilled": False},
    "deit-tiny-distilled": {"embed_dim": 192, "depth": 12, "num_heads": 3, "distilled": True},
    "deit-small-distilled": {"embed_dim": 384, "depth": 12, "num_heads": 6, "distilled": True},
    "deit-base-distilled": {"embed_dim": 768, "depth": 12, "num_heads": 12, "distilled": True},
}


@MODELS.register_module()
class VisionTransformer(Backbone):
    """Vision transformer for pretraining and for dense tasks; a stage is a block.

    Args:
        arch: One of ``deit-tiny``, ``deit-small``, ``deit-base``, or these with ``-distilled``;
            fields that are given win over it.
        embed_dim: Channels.
        depth: Number of blocks.
        num_heads: Attention heads.
        distilled: Whether a distillation token follows the class token.
        img_size: Side or (height, width) that the position embedding is made for; images of
            another size interpolate it.
        patch_size: Side of a patch in pixels.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        drop_path_rate: Stochastic depth of the last block; linear from 0 over all blocks.
        out_indices: Blocks whose maps ``forward`` returns (default: the last); ``()`` for
            pretraining.
        final_norm: Whether the last block's map passes the final norm, in dense tasks.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i blocks as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    dropped_keys = (r"norm\.(weight|bias)", r"head(_dist)?\..*", "dist_token")
    initial_keys = (r"norm\.(weight|bias)",)
    has_class_token = True

    def __init__(
        self,
        arch: str | None = None,
        embed_dim: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        distilled: bool | None = None,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path_rate: float = 0.1,
        out_indices: tuple[int, ...] = (-1,),
        final_norm: bool = False,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        sizes = resolve(
            type(self).__name__,
            ARCHITECTURES,
            arch,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            distilled=distilled if arch or distilled is not None else False,
        )
        dim, depth, num_heads = sizes["embed_dim"], sizes["depth"], sizes["num_heads"]
        check_heads([dim], [num_heads])
        architecture = {**sizes, "img_size": list(to_2tuple(img_size)), "patch_size": patch_size}
        architecture |= {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias}
        super().__init__(
            architecture,
            [dim] * depth,
            patch_size,
            patch_size,
            out_indices,
            frozen_stages,
            with_cp,
            init_cfg,
        )
        self.grid = tuple(-(-side // patch_size) for side in to_2tuple(img_size))
        self.num_prefix = 1 + sizes["distilled"]
        if not sizes["distilled"]:  # a file's distillation token is dropped, but not made up
            self.free_fields = ("distilled",)
        self.patch_embed = PatchEmbed(
            None, patch_size, 3, dim, output_fmt="NHWC", dynamic_img_pad=True
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        if sizes["distilled"]:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, dim))
        num_tokens = self.num_prefix + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, num_tokens, dim))
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, num_heads, qkv_bias),
                Mlp(dim, int(dim * mlp_ratio)),
                rate,
                norm_eps=1e-6,
            )
            for rate in torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        )
        if not self.out_indices or final_norm:
            self.norm = nn.LayerNorm(dim, 1e-6)
        self.final_norm = final_norm
        self.apply(init_linear)
        for token in self._embedding_parameters():
            trunc_normal_(token, std=0.02)
        self._register_load_state_dict_pre_hook(self._fit_on_load)
        self.freeze()

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x, token_labels, grid = self._embed(images, token_labels)
        maps, row, last = [], None, len(self.blocks) - 1
        for i, block in enumerate(self.blocks[: self.num_reached]):
            if class_attention and i == last:
                row = block.class_attention(x, self.num_prefix).unflatten(1, grid)
            x, token_labels = run_block(block, x, token_labels, self.with_cp)
            if i in self.out_indices:
                normed = self.norm(x) if self.final_norm and i == last else x
                maps.append(to_nchw(normed[:, self.num_prefix :].unflatten(1, grid)))
        if self.out_indices:
            return maps, None
        x = self.norm(x[:, : self.num_prefix])
        distilled = x[:, 1] if self.num_prefix == 2 else None
        label = None if token_labels is None else token_labels[:, 0]
        return maps, Pooled(x[:, 0], label, row, distilled)

    def _embed(
        self, images: Tensor, token_labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
        """Tokens (B, L + N, C) with their positions, labels (B, L + N, K), and the patch grid."""
        x = self.patch_embed(images)  # (B, H, W, C)
        grid = (x.shape[1], x.shape[2])
        prefix, patches = self.pos_embed.split([self.num_prefix, self.grid[0] * self.grid[1]], 1)
        x = x.flatten(1, 2) + resize_pos_embed(patches, self.grid, grid)
        tokens = [self.cls_token, self.dist_token] if self.num_prefix == 2 else [self.cls_token]
        tokens = (torch.cat(tokens, 1) + prefix).expand(len(x), -1, -1)
        x = torch.cat([tokens.to(x.dtype), x], dim=1)
        if token_labels is not None:
            token_labels = stream.join(token_labels.flatten(1, 2), self.num_prefix)
        return x, token_labels, grid

    def _embedding_parameters(self) -> list[nn.Parameter]:
        tokens = [self.dist_token] if self.num_prefix == 2 else []
        return [self.cls_token, self.pos_embed, *tokens]

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each block, the last one with the final norm."""
        stages = [[block] for block in self.blocks]
        if hasattr(self, "norm"):
            stages[-1].append(self.norm)
        return [[self.patch_embed], *stages]

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Tokens and position embedding belong to the patch embedding."""
        embedding, *stages = super().stage_parameters()
        return [[*embedding, *self._embedding_parameters()], *stages]

    def _num_blocks(self) -> int:
        return len(self.blocks)

    def _depth_of(self, parts: list[str]) -> int | None:
        if parts[0] in ("patch_embed", "pos_embed", "cls_token", "dist_token"):
            return 0
        return int(parts[1]) + 1 if parts[0] == "blocks" else None

    def fit(self, tensors: dict[str, Tensor], source: dict[str, Any]) -> dict[str, Tensor]:
        """Resize the position embedding from the grid that the file names, non-square included."""
        if "img_size" in source:
            grid = tuple(-(-side // source["patch_size"]) for side in source["img_size"])
            self._fit_on_load(tensors, "", source=grid)
        return tensors

    def _fit_on_load(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *_: Any,
        source: tuple[int, int] | None = None,
    ) -> None:
        """Fit the position embedding of another image size, or of a distilled model."""
        name = f"{prefix}pos_embed"
        if name in state_dict and state_dict[name].shape != self.pos_embed.shape:
            theirs = 2 if f"{prefix}dist_token" in state_dict else 1
            if theirs >= self.num_prefix:  # a token's position cannot be made up
                state_dict[name] = fit_pos_embed(
                    state_dict[name], theirs, self.num_prefix, self.grid, source
                )
