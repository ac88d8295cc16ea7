"""Stand-ins for what the mm libraries expect and an installation may lack.

Importing this module installs the torchvision-backed ``mmcv._ext`` where mmcv has no compiled one,
so that a config asks for it with ``custom_imports=dict(imports=['tlalign_mm.compat'])``.
"""

from tlalign_mm.compat.mmcv_ext import install_mmcv_ext

__all__ = ["install_mmcv_ext"]

install_mmcv_ext()
