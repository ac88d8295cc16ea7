"""mmengine's checkpoint loading without its fall-back to running pickles.

mmengine reads ``--resume``, ``load_from`` and ``init_cfg`` by its ``CheckpointLoader``, whose
loaders unpickle a file that torch refuses as unsafe [mmengine/runner/checkpoint.py]. And a resumed
run executes the text at ``meta['config']``, a key of mmcv's days, as a config file
[mmengine/runner/runner.py]. Here both end.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.runner import CheckpointLoader
from torch import Tensor

from tlalign_mm.checkpoints import CheckpointError, read
from tlalign_mm.checkpoints.files import read_content
from tlalign_mm.checkpoints.kinds import kind_of, one_line

MapLocation = str | torch.device | dict[str, str] | Callable[..., Any] | None


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust``, the only way to let a checkpoint run code."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run whatever code a checkpoint holds if it is not data alone; only for files whose "
        "maker you trust as you trust a program (default: refuse such files)",
    )


def load_safely(trust: bool = False) -> None:
    """Make mmengine read checkpoints as data, in this process and from here on.

    Local files and http(s) addresses are read by this package; for other schemes there is an error.

    Args:
        trust: Let a file that is not data alone run its code, and leave other schemes to mmengine.
    """

    def load_from_local(filename: str, map_location: MapLocation = None) -> dict:
        return _load(Path(filename).expanduser(), map_location, trust)

    def load_from_http(filename: str, map_location: MapLocation = None) -> dict:
        return _load(_fetch(filename), map_location, trust)

    def load_from_elsewhere(filename: str, map_location: MapLocation = None) -> dict:
        raise CheckpointError(
            f"Checkpoint {filename} is of a scheme that is not read safely; download the file and "
            "name its path."
        )

    if not trust:  # also for schemes that others have registered
        CheckpointLoader.register_scheme(
            list(CheckpointLoader._schemes), load_from_elsewhere, force=True
        )
    CheckpointLoader.register_scheme("", load_from_local, force=True)
    CheckpointLoader.register_scheme(["http://", "https://"], load_from_http, force=True)


def _load(path: Path, map_location: MapLocation, trust: bool) -> dict:
    """All that a file holds, as mmengine expects it."""
    if not path.is_dir() and kind_of(path) not in ("safetensors", "index"):
        content = read_content(path, trust)
        if not isinstance(content, dict):
            raise CheckpointError(
                f"Checkpoint {path} holds a {type(content).__name__}; name the file of a run."
            )
        if isinstance(content.get("meta"), dict) and not trust:
            content["meta"].pop("config", None)  # a text that mmengine would execute
    else:
        checkpoint = read(path)
        content = {"state_dict": checkpoint.tensors, "meta": dict(checkpoint.meta)}
    # a rule for the devices that the tensors lay on has nothing to do: they are on the CPU here
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    try:
        return _moved(content, torch.device(device), {})
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"Checkpoint {path} cannot be moved to {device} ({one_line(error)}); load it with "
            "map_location='cpu'."
        ) from error


def _moved(value: Any, device: torch.device, known: dict[int, Tensor]) -> Any:
    """Copies of all tensors, which lie in the file: a run may write over its own."""
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value.to(device, copy=True)
        return known[id(value)]
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device, known)
    if isinstance(value, list):
        value[:] = [_moved(item, device, known) for item in value]
    if type(value) is tuple:
        return tuple(_moved(item, device, known) for item in value)
    return value


def _fetch(url: str) -> Path:
    """Download into torch's folder of checkpoints, unless the file is there."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    if is_main_process():
        _download(url, path)
    barrier()
    _download(url, path)  # where machines do not share the folder
    return path


def _download(url: str, path: Path) -> None:
    if path.is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"Checkpoint {url} cannot be fetched ({one_line(error)}); download it and name the "
            "file."
        ) from error
