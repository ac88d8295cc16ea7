"""What every backbone shares: the mm contract around a vision transformer.

The outer contract is mmsegmentation's and mmdetection's (``init_cfg``, ``frozen_stages``,
``forward`` to a tuple of maps); ``forward_features`` is the one for pretraining.
"""

from typing import Any, NamedTuple

from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn

from tlalign_mm.checkpoints import CheckpointError, LoadReport, load_state, read


class Pooled(NamedTuple):
    """What pretraining needs of an image.

    Attributes:
        features: (B, C) after the final norm.
        token_labels: (B, K) the label that belongs to ``features``, or None.
    """

    features: Tensor
    token_labels: Tensor | None


class Backbone(BaseModule):
    """Base of all backbones; a subclass calls ``freeze()`` at the end of its constructor.

    Attributes:
        architecture: The fields that fix the shape of every tensor; exported with the weights and
            compared when they are loaded.
        dropped_keys: Patterns of names that a checkpoint may hold in vain.
        initial_keys: Patterns of names that a checkpoint need not hold.
    """

    dropped_keys: tuple[str, ...] = ()
    initial_keys: tuple[str, ...] = ()

    def __init__(
        self, architecture: dict[str, Any], frozen_stages: int = -1, init_cfg: dict | None = None
    ) -> None:
        super().__init__(init_cfg)
        self.architecture = {"type": type(self).__name__, **architecture}
        self.frozen_stages = frozen_stages

    def stage_modules(self) -> list[list[nn.Module]]:
        """Modules in the order of the data: the patch embedding first, then each stage."""
        raise NotImplementedError("abstract")

    def init_weights(self) -> None:
        """Load ``init_cfg=dict(type='Pretrained', checkpoint=…)`` and log the report.

        The constructor has initialised all tensors; an ``init_cfg`` of another type is mmengine's
        and replaces those that it names.
        """
        cfg = dict(self.init_cfg or {})
        if cfg.pop("type", None) != "Pretrained":
            super().init_weights()
            return
        print_log(str(self.load(**cfg)), logger="current")
        self._is_init = True

    def load(self, checkpoint: str, strict: bool = True) -> LoadReport:
        """Load a backbone file of this layout.

        Args:
            checkpoint: Path of the file.
            strict: Fail on unexplained tensors and on too little coverage.

        Raises:
            CheckpointError: If the file cannot be read or does not fit.
        """
        file = read(checkpoint)
        self._check_architecture(file.architecture, checkpoint)
        return load_state(
            self, file.tensors, str(checkpoint), self.dropped_keys, self.initial_keys, strict
        )

    def _check_architecture(self, theirs: dict[str, Any] | None, source: str) -> None:
        differing = {
            key: (value, self.architecture.get(key))
            for key, value in (theirs or {}).items()
            if key != "window_size" and value != self.architecture.get(key)
        }  # tables of another window size are resized
        if differing:
            fields = "; ".join(f"{k} is {a} there and {b} here" for k, (a, b) in differing.items())
            raise CheckpointError(
                f"Checkpoint {source} is of another architecture: {fields}; change the backbone's "
                "fields in the config or name another file."
            )

    def freeze(self) -> None:
        """Stop gradients and noise in the patch embedding and the first ``frozen_stages`` stages.

        -1 freezes nothing, 0 the patch embedding alone.
        """
        for modules in self.stage_modules()[: self.frozen_stages + 1]:
            for module in modules:
                module.eval()
                module.requires_grad_(False)

    def train(self, mode: bool = True) -> "Backbone":
        """Set the mode; frozen stages stay in evaluation mode."""
        super().train(mode)
        self.freeze()
        return self
