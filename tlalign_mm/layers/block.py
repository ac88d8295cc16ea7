"""The transformer block, with the label stream beside the feature stream."""

import torch.utils.checkpoint as gradient_checkpoint
from timm.layers import DropPath
from torch import Tensor, nn

from tlalign_mm.labels import stream


class Block(nn.Module):
    """Attention and MLP, each behind a norm and a residual (ViT, PVT and Swin alike).

    Args:
        dim: Channels C.
        attn: Maps (x, token_labels) to a pair of the same shapes.
        mlp: Maps x to its own shape, token by token or by small convolutions; labels pass it by.
        drop_path: Rate of stochastic depth of both branches.
        norm_eps: Epsilon of both norms.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, norm_eps)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, norm_eps)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, ..., C) features and (B, ..., K) labels to the same shapes."""
        moved, moved_labels = self.attn(self.norm1(x), token_labels)
        x = x + self.drop_path1(moved)
        if token_labels is not None:
            token_labels = stream.residual(moved_labels, token_labels)
        return x + self.drop_path2(self.mlp(self.norm2(x))), token_labels

    def class_attention(self, x: Tensor, num_prefix: int = 1) -> Tensor:
        """Row of the class token in this block's attention to the patch tokens, (B, N)."""
        return self.attn.class_attention(self.norm1(x))[:, num_prefix:]


def run_block(
    block: nn.Module, x: Tensor, token_labels: Tensor | None, with_cp: bool
) -> tuple[Tensor, Tensor | None]:
    """Call a block; ``with_cp`` recomputes it in the backward pass instead of keeping its memory.

    Labels need no gradient, but they come from the same call and are recomputed with it.
    """
    if with_cp and block.training:
        return gradient_checkpoint.checkpoint(block, x, token_labels, use_reentrant=False)
    return block(x, token_labels)
