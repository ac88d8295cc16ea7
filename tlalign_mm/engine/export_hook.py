"""Export the backbone of a run, ready for a dense model's ``init_cfg``."""

from pathlib import Path

from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from tlalign_mm.checkpoints import Checkpoint, write
from tlalign_mm.registry import HOOKS


@HOOKS.register_module()
class ExportBackboneHook(Hook):
    """Write ``backbone.safetensors`` when the run ends and ``backbone_best.safetensors`` at a best.

    The file's metadata names the layout and the architecture. It is written whole or not at all.

    Args:
        monitor: Figure of the validation that decides what is best; higher is better.
    """

    priority = "LOW"

    def __init__(self, monitor: str = "accuracy/top1") -> None:
        self.monitor = monitor

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Export where the monitored figure is the highest so far.

        Raises:
            ValueError: If the validation does not report the figure.
        """
        if not metrics or self.monitor not in metrics:
            raise ValueError(
                f"ExportBackboneHook monitors {self.monitor!r}, but the validation reports "
                f"{sorted(metrics or {})}; set monitor to one of them."
            )
        key = "export_backbone_best"  # in the message hub, so that a resumed run knows it
        best = runner.message_hub.runtime_info.get(key)
        if best is None or metrics[self.monitor] > best:
            runner.message_hub.update_info(key, float(metrics[self.monitor]))
            self._export(runner, "backbone_best.safetensors")

    def after_train(self, runner: Runner) -> None:
        """Export the backbone as training left it."""
        self._export(runner, "backbone.safetensors")

    @master_only
    def _export(self, runner: Runner, name: str) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        backbone = model.backbone
        checkpoint = Checkpoint(backbone.state_dict(), "tlalign_mm", backbone.architecture)
        path = write(Path(runner.work_dir) / name, checkpoint)
        runner.logger.info(f"Exported the backbone to {path}")
