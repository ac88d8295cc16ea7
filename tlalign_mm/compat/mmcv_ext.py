"""A module ``mmcv._ext`` for an mmcv that was installed without its compiled ops."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from tlalign_mm.compat import boxes, deform, focal, roi

_NAME = "mmcv._ext"


def install_mmcv_ext() -> bool:
    """Put the torchvision fallback in the place of ``mmcv._ext``, unless mmcv has its own.

    Calling it again changes nothing. A compiled extension that exists but does not load is left
    alone: importing it reports why.

    Returns:
        Whether the fallback is in use: false when mmcv is absent or brings a compiled extension.
    """
    if importlib.util.find_spec("mmcv") is None:
        return False
    found = importlib.util.find_spec(_NAME)  # imports the package mmcv, not mmcv.ops or mmcv.cnn
    if found is not None:
        return isinstance(found.loader, _FallbackLoader)
    spec = importlib.machinery.ModuleSpec(_NAME, _FallbackLoader(), origin=__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    sys.modules["mmcv"]._ext = module
    return True


class _FallbackLoader(importlib.abc.Loader):
    """Fills the module; its type in ``__spec__.loader`` is also what tells it from a compiled one.

    ``mmcv.utils.check_ops_exist`` looks for a loader, so a spec without one would not do.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None  # the default module object serves

    def exec_module(self, module: ModuleType) -> None:
        supplied = (
            _compiler_functions() | boxes.MMCV_OPS | deform.MMCV_OPS | focal.MMCV_OPS | roi.MMCV_OPS
        )
        vars(module).update(supplied, __getattr__=_missing_op)


def _compiler_functions() -> dict[str, Callable[[], str]]:
    """The two functions of mmcv/ops/info.py, which ``mmcv.utils.collect_env`` prints."""

    def version() -> str:
        return "not compiled (torchvision fallback)"

    return {"get_compiler_version": version, "get_compiling_cuda_version": version}


def _missing_op(name: str) -> Callable[..., NoReturn]:
    """Stand for an op not supplied.

    mmcv looks up the ops of all its wrappers when mmcv.ops is imported, so a missing one may raise
    only when it is called.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"mmcv op {name!r} is not supplied by the torchvision fallback; install mmcv with "
            "compiled ops (pip/mim install of an mmcv wheel that matches your torch) to use it."
        )

    missing.__name__ = name
    return missing
