"""Reading checkpoints safely, and a report of what became of every tensor."""

from tlalign_mm.checkpoints.files import Checkpoint, CheckpointError, read, write
from tlalign_mm.checkpoints.report import LoadReport, load_state

__all__ = ["Checkpoint", "CheckpointError", "LoadReport", "load_state", "read", "write"]
