"""Reading checkpoints safely, and a report of what became of every tensor."""

from tlalign_mm.checkpoints.convert import Weights, read_weights, write_weights
from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.files import (
    Checkpoint,
    Header,
    check_finite,
    read,
    read_header,
)
from tlalign_mm.checkpoints.prefixes import Part, backbone_part
from tlalign_mm.checkpoints.report import Report, account, load_state
from tlalign_mm.checkpoints.write import write

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Header",
    "Part",
    "Report",
    "Weights",
    "account",
    "backbone_part",
    "check_finite",
    "load_state",
    "read",
    "read_header",
    "read_weights",
    "write",
    "write_weights",
]
