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
from mmengine.config import Config, ConfigDict
from mmengine.dist import barrier, is_main_process
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from tlalign_mm.checkpoints import CheckpointError, read
from tlalign_mm.checkpoints.archives import Place
from tlalign_mm.checkpoints.files import read_content
from tlalign_mm.checkpoints.kinds import kind_of, one_line
from tlalign_mm.checkpoints.torch_data import TORCH_RULES
from tlalign_mm.checkpoints.unpickle import Rules

HISTORY = ("max_length", "_log_history", "_count_history")
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
        content = read_content(path, MM_RULES, _placed(map_location), trust)
        if not isinstance(content, dict):
            raise CheckpointError(
                f"Checkpoint {path} holds a {type(content).__name__}; name the file of a run."
            )
        if isinstance(content.get("meta"), dict) and not trust:
            content["meta"].pop("config", None)  # a text that mmengine would execute
        return content
    checkpoint = read(path)
    return {"state_dict": checkpoint.tensors, "meta": dict(checkpoint.meta)}


def _placed(map_location: MapLocation) -> Place:
    """Where storages go: as for ``torch.load``, and never left in the file."""

    def place(data: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        data = data.clone()  # the run may write over its file
        if callable(map_location):
            moved = map_location(data, device)
            return _restore(data, device) if moved is None else moved
        if isinstance(map_location, dict):
            return _restore(data, map_location.get(device, device))
        return _restore(data, device if map_location is None else str(map_location))

    return place


def _restore(data: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    try:
        return torch.serialization.default_restore_location(data, device)
    except RuntimeError as error:
        raise CheckpointError(
            f"A checkpoint's tensors lie on {device}, which is not usable here "
            f"({one_line(error)}); load it with map_location='cpu'."
        ) from error


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


def _history(*_: object) -> HistoryBuffer:
    return HistoryBuffer()


def _set_history(target: HistoryBuffer, state: object) -> None:
    """The numbers; the statistics, which are functions, are mmengine's own."""
    if not isinstance(state, dict) or not {*HISTORY} <= state.keys():
        raise ValueError("an odd history")
    target.__setstate__({key: state[key] for key in HISTORY})


def _config_dict(items: object = ()) -> ConfigDict:
    value = ConfigDict()
    dict.update(value, TORCH_RULES.builders["builtins.dict"](items))  # its values are converted
    return value


def _config(*_: object) -> Config:
    return Config.__new__(Config)


def _set_config(target: Config, state: object) -> None:
    if not isinstance(state, tuple) or not isinstance(state[0], ConfigDict):
        raise ValueError("an odd config")
    target.__setstate__(state)


MM_RULES = Rules(
    values=TORCH_RULES.values,
    builders={
        **TORCH_RULES.builders,
        "mmengine.logging.history_buffer.HistoryBuffer": _history,
        "mmengine.config.config.ConfigDict": _config_dict,
        "mmengine.config.config.Config": _config,
    },
    states={**TORCH_RULES.states, HistoryBuffer: _set_history, Config: _set_config},
)
