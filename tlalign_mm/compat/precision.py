"""The number format in which the fallback ops compute."""

import torch
from torch import Tensor


def kernel_dtype(*tensors: Tensor) -> torch.dtype:
    """Choose the dtype for one torchvision kernel call.

    torchvision's kernels want all operands in one dtype, and on the CPU several lack half and all
    lack bfloat16. Float32 holds both exactly, so ops compute in it and round their result once.

    Args:
        tensors: The operands of the call, of any shape.

    Returns:
        ``torch.float64`` if any operand has it, else ``torch.float32``.
    """
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
