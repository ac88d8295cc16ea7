"""Fields of a backbone's constructor: published sizes by name, and one sentence for a wrong one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def resolve(
    name: str, architectures: Mapping[str, Mapping[str, Any]], arch: str | None, **fields: Any
) -> dict[str, Any]:
    """Sizes of ``arch`` with the given fields on top.

    Args:
        name: Name of the class, for messages.
        architectures: Published sizes by name.
        arch: One of the names, or None where the fields say everything.
        fields: Every field that fixes a shape; None leaves it to ``arch``.

    Raises:
        ValueError: If ``arch`` is unknown or a field is given by neither.
    """
    if arch is not None and arch not in architectures:
        raise ValueError(
            f"arch={arch!r} is unknown to {name}; choose one of {', '.join(architectures)}."
        )
    given = {key: value for key, value in fields.items() if value is not None}
    sizes = {**architectures.get(arch, {}), **given}
    absent = [key for key in fields if key not in sizes]
    if absent:
        raise ValueError(f"{name} needs arch=… or the fields {', '.join(absent)}.")
    return {key: list(v) if isinstance(v, list | tuple) else v for key, v in sizes.items()}


def check_out_indices(out_indices: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Indices counted from the front; -1 is the last stage.

    Raises:
        ValueError: If one is out of range.
    """
    outside = [i for i in out_indices if not -num_stages <= i < num_stages]
    if outside:
        raise ValueError(f"out_indices={tuple(out_indices)} must lie in 0 … {num_stages - 1}.")
    return tuple(i % num_stages for i in out_indices)


def check_heads(dims: list[int], num_heads: list[int]) -> None:
    """Every stage's heads divide its channels.

    Raises:
        ValueError: If they do not, naming the stage.
    """
    for i, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
        if dim % heads:
            raise ValueError(f"num_heads[{i}]={heads} must divide {dim} channels.")


def check_stages(**fields: list[int]) -> None:
    """All lists have one entry a stage.

    Raises:
        ValueError: If their lengths differ.
    """
    if len({len(value) for value in fields.values()}) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in fields.items())
        raise ValueError(f"The fields {listed} must have one entry a stage.")


def check_images(images: Tensor, patch_size: int) -> None:
    """Images are a batch of at least one patch each.

    Raises:
        ValueError: If they are not.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be (B, 3, H, W), but have shape {tuple(images.shape)}.")
    if min(images.shape[2:]) < patch_size:
        raise ValueError(
            f"images are {images.shape[2]}x{images.shape[3]} pixels, smaller than a patch of "
            f"{patch_size}x{patch_size}; resize them or choose a smaller patch_size."
        )


def check_token_labels(token_labels: Tensor, batch: int, grid: tuple[int, int]) -> None:
    """Labels fit the images' patches, and every row is a distribution.

    Raises:
        ValueError: If they do not, or hold NaN.
    """
    if token_labels.ndim != 3 or token_labels.shape[:2] != (batch, grid[0] * grid[1]):
        raise ValueError(
            f"token_labels have shape {tuple(token_labels.shape)}, but {batch} images of "
            f"{grid[0]}x{grid[1]} patches need ({batch}, {grid[0] * grid[1]}, K); make them with "
            "the backbone's patch_size."
        )
    total = token_labels.sum(dim=-1)
    valid = (token_labels.amin(dim=-1) >= 0) & ((total - 1).abs() < 1e-3)  # false for NaN
    if not torch.all(valid):
        image, token = (~valid).nonzero()[0].tolist()
        row = token_labels[image, token]
        raise ValueError(
            f"token_labels[{image}, {token}] sums to {row.sum().item():.4g} with smallest entry "
            f"{row.amin().item():.4g}; every row must be non-negative and sum to 1."
        )
