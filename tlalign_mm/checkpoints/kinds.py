"""What kind of file this is, from its bytes and not from its name."""

import codecs
import struct
from pathlib import Path

from tlalign_mm.checkpoints.errors import CheckpointError

HEADER_BYTES = 100_000_000  # the longest header that safetensors allows
OTHERS = {
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"\x89HDF": "is an HDF5 file of Keras; convert it to PyTorch first",
    b"BZh": "is compressed with bzip2; unpack it",
    b"\xfd7zXZ": "is compressed with xz; unpack it",
}


def kind_of(path: Path) -> str:
    """``safetensors``, ``index``, ``zip``, ``tar`` or ``pickle``.

    Raises:
        CheckpointError: If the file cannot be opened or is nothing that holds a checkpoint.
    """
    if not path.exists():
        raise CheckpointError(f"Checkpoint {path} does not exist; correct the path.")
    if not path.is_file():
        raise CheckpointError(f"Checkpoint {path} is no file; name a file in it.")
    try:
        with path.open("rb") as file:
            start = file.read(512)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {path} cannot be opened ({error.strerror}); mend that and run this again."
        ) from error
    if not start:
        raise CheckpointError(f"Checkpoint {path} is empty; delete it and make it again.")
    kind = _kind_of_bytes(start, size)
    if kind is None:
        raise CheckpointError(f"Checkpoint {path} {_explain(start, size)}.")
    return kind


def _kind_of_bytes(start: bytes, size: int) -> str | None:
    if start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] <= HEADER_BYTES:
        return "safetensors"
    if start[:4] in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    if start[257:262] == b"ustar":
        return "tar"
    if start[:1] == b"\x80" and start[1:2] in tuple(bytes([i]) for i in range(6)):
        return "pickle"
    keys = (b'"weight_map"', b'"metadata"')
    if start.lstrip()[:1] == b"{" and any(key in start for key in keys):
        return "index"
    return None


def _explain(start: bytes, size: int) -> str:
    for magic, sentence in OTHERS.items():
        if start.startswith(magic):
            return sentence
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a pointer of git-lfs, not the file itself; fetch it with git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<")):
        found = "HTML"
    elif text.startswith((b"{", b"[")):
        found = "JSON"
    elif _is_text(start):
        found = "text"
    else:
        return (
            f"has {size} bytes in no format of checkpoints; it is damaged or another kind of file, "
            "so make it again"
        )
    return (
        f"holds {found}, not a checkpoint, probably a failed download; delete it and fetch it again"
    )


def _is_text(start: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # may end within a letter
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


def damaged(path: Path, reason: object) -> CheckpointError:
    """The error for a file that ends too early or contradicts itself."""
    size = path.stat().st_size
    return CheckpointError(
        f"Checkpoint {path} is incomplete or damaged ({size} bytes; {one_line(reason)}); delete it "
        "and make it again."
    )


def one_line(reason: object) -> str:
    """The first line of an error's text, shortened, as a part of a sentence."""
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    return lines[0].strip().rstrip(".")[:120]
