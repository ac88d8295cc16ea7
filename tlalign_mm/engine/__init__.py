"""What surrounds a run: hooks and the start of the command line tools."""

from tlalign_mm.engine.export_hook import ExportBackboneHook

__all__ = ["ExportBackboneHook"]
