"""Writers of checkpoint files as the world keeps them: formats, wrappers and prefixes."""

import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlalign_mm.checkpoints.unpickle import inert_pickle

TENSORS = {
    "patch_embed.proj.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "norm.num_batches_tracked": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}
STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
}


def save_zip(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def save_legacy(path: Path, content: object) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def save_tar(path: Path, content: object) -> Path:
    """The format of torch up to 0.1.9, whose tensors all have a storage and an id of their own."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> int | None:
            if isinstance(value, Tensor):
                tensors.append(value)
                return 1000 + len(tensors) - 1
            return None

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(content)
    storages, views = pickle.dumps(len(tensors), 2), pickle.dumps(len(tensors), 2)
    for i, tensor in enumerate(tensors):
        storages += pickle.dumps((i, "cuda:0", STORAGES[tensor.dtype]), 2)
        storages += struct.pack("<q", tensor.numel()) + bits(tensor)
        views += pickle.dumps((1000 + i, i, torch.FloatTensor), 2)
        numbers = [*tensor.shape, *tensor.contiguous().stride(), 0]
        views += struct.pack(f"<ii{len(numbers)}q", tensor.ndim, 0, *numbers)
    storages += pickle.dumps([], 2)
    with tarfile.open(path, "w") as archive:
        members = {"storages": storages, "tensors": views, "pickle": pickled.getvalue()}
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def save_safetensors(path: Path, content: dict[str, Tensor]) -> Path:
    save_file(content, path, {"format": "pt"})
    return path


def save_shards(
    path: Path, content: dict[str, Tensor], save: Callable = save_safetensors, suffix: str = ""
) -> Path:
    """Two shards and their index in a folder of this name."""
    path.mkdir()
    names = list(content)
    places = {n: f"model-{i % 2}.{suffix or 'safetensors'}" for i, n in enumerate(names)}
    for shard in set(places.values()):
        save(path / shard, {n: t for n, t in content.items() if places[n] == shard})
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return index


FORMATS: dict[str, Callable[[Path, dict], Path]] = {
    "zip": save_zip,
    "legacy": save_legacy,
    "tar": save_tar,
    "safetensors": save_safetensors,
    "shards": save_shards,
    "shards_bin": lambda path, content: save_shards(path, content, save_zip, "bin"),
}
FLAT = {"safetensors", "shards", "shards_bin"}  # formats that know no wrappers
OTHERS = {"optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}, "epoch": 3}
WRAPPERS: dict[str, Callable[[dict[str, Tensor]], dict]] = {
    "bare": lambda tensors: tensors,
    **{
        key: lambda tensors, key=key: {key: tensors, **OTHERS}
        for key in (
            "state_dict model module model_ema state_dict_ema ema_state_dict teacher student "
            "backbone".split()
        )
    },
    "model+state_dict": lambda tensors: {"model": {"state_dict": tensors}, **OTHERS},
}
PREFIXES = (
    "",
    "module.",
    "_orig_mod.",
    "backbone.",
    "encoder.",
    "model.",
    "module.backbone.",
    "_orig_mod.module.backbone.",
    "model.backbone.encoder.",
    "model.module.encoder._orig_mod.",
)
CASES = [
    (form, wrapper, prefix)
    for form in FORMATS
    for wrapper in WRAPPERS
    for prefix in PREFIXES
    if wrapper == "bare" or form not in FLAT
]


def write_sample(path: Path, form: str, wrapper: str, prefix: str, tensors: dict) -> Path:
    """Write ``tensors`` in one of the ways above and give the file to be read."""
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    return FORMATS[form](path, WRAPPERS[wrapper](named))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same names and bit-equal tensors."""
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype
        and one[k].shape == other[k].shape
        and bits(one[k]) == bits(other[k])
        for k in one
    )


def bits(tensor: Tensor) -> bytes:
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def repack(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Change the records of a zip archive; the checksums are right again afterwards."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            changed = change(name.split("/", 1)[1], data)
            if changed is not None:
                archive.writestr(name, changed)
    return path


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def unpickle(pickled: bytes) -> tuple[object, list[str]]:
    """What a pickle holds, and the names in it that are not allowed."""
    module, unsafe = inert_pickle()
    return module.load(io.BytesIO(pickled), encoding="latin1"), list(unsafe)
