"""What every backbone shares: the mm contract around a vision transformer.

The outer contract is mmsegmentation's and mmdetection's (``init_cfg``, ``frozen_stages``,
``forward`` to a tuple of maps); ``forward_features`` is the one for pretraining. Both run the same
loop over the blocks, which each architecture writes once.
"""

import inspect
from typing import Any, NamedTuple

from mmengine.logging import print_log
from mmengine.model import BaseModule
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.fields import check_images, check_out_indices, check_token_labels
from tlalign_mm.checkpoints import CheckpointError, Report, load_state, read, read_weights

RESIZABLE = ("window_size", "img_size")  # their tables and position embeddings are interpolated


class Pooled(NamedTuple):
    """What pretraining needs of an image.

    Attributes:
        features: (B, C) after the final norm.
        token_labels: (B, K) the label that belongs to ``features``, or None.
        class_attention: (B, H', W') attention of the class token to the patches of the last map,
            head mean of the last block, without the class token itself; or None.
        distilled: (B, C) features of the distillation token, or None where there is none.
    """

    features: Tensor
    token_labels: Tensor | None = None
    class_attention: Tensor | None = None
    distilled: Tensor | None = None


class Backbone(BaseModule):
    """Base of all backbones; a subclass calls ``freeze()`` at the end of its constructor.

    Args:
        architecture: The fields that fix the shape of every tensor; exported with the weights and
            compared when they are loaded.
        num_features: Channels of each stage's map.
        patch_size: Side of a patch in pixels.
        stride: Pixels between the tokens of the last map.
        out_indices: Stages whose maps ``forward`` returns; ``()`` for pretraining.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i stages as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Attributes:
        dropped_keys: Patterns of names that a checkpoint may hold in vain.
        initial_keys: Patterns of names that a checkpoint need not hold.
        free_fields: Fields of the architecture that a file may differ in.
        has_class_token: Whether pretraining can return class attention.
    """

    dropped_keys: tuple[str, ...] = ()
    initial_keys: tuple[str, ...] = ()
    free_fields: tuple[str, ...] = ()
    has_class_token = False

    def __init__(
        self,
        architecture: dict[str, Any],
        num_features: list[int],
        patch_size: int,
        stride: int,
        out_indices: tuple[int, ...],
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.architecture = {"type": type(self).__name__, **architecture}
        self.num_features = num_features
        self.patch_size = patch_size
        self.stride = stride
        self.out_indices = check_out_indices(out_indices, len(num_features))
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Compute the maps of dense tasks.

        Args:
            images: (B, 3, H, W), any size from one patch up.

        Returns:
            Contiguous (B, C, H', W') maps at ``out_indices``.

        Raises:
            ValueError: If the images are smaller than a patch.
        """
        check_images(images, self.patch_size)
        maps, _ = self._run(images)
        return tuple(maps)

    def forward_features(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> Pooled:
        """Pool the image for classification, and its labels by the same path.

        Args:
            images: (B, 3, H, W)
            token_labels: (B, N, K) on the patch grid, row-major, without the class token; or None.
            class_attention: Also return the class row of the last block's attention (TransMix).

        Raises:
            ValueError: If images or labels do not fit, the model was built for dense tasks
                (``out_indices`` not empty), or class attention is asked of a model that pools.
        """
        name = type(self).__name__
        if self.out_indices:
            raise ValueError(
                f"{name} pools only when built with out_indices=(); it has "
                f"out_indices={self.out_indices}."
            )
        if class_attention and not self.has_class_token:
            raise ValueError(
                f"class_attention=True needs a class token, but {name} pools over all tokens; "
                "choose a backbone that has one (CASwinTransformer in place of SwinTransformer)."
            )
        check_images(images, self.patch_size)
        if token_labels is not None:
            height, width = (-(-side // self.patch_size) for side in images.shape[2:])
            check_token_labels(token_labels, len(images), (height, width))
            token_labels = token_labels.detach().float().unflatten(1, (height, width))
        _, pooled = self._run(images, token_labels, class_attention)
        return pooled

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        """The loop: maps at ``out_indices``, or without any of those what pretraining needs.

        Labels are a map (B, H, W, K) on the patch grid.
        """
        raise NotImplementedError("abstract")

    @property
    def num_reached(self) -> int:
        """Stages that are run: those after the last of ``out_indices`` serve no one."""
        return max(self.out_indices, default=len(self.num_features) - 1) + 1

    def stage_modules(self) -> list[list[nn.Module]]:
        """Modules in the order of the data: the patch embedding first, then each stage."""
        raise NotImplementedError("abstract")

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Parameters in the same order, tokens and position embeddings included."""
        return [list(nn.ModuleList(modules).parameters()) for modules in self.stage_modules()]

    def freeze(self) -> None:
        """Stop gradients and noise in the patch embedding and the first ``frozen_stages`` stages.

        -1 freezes nothing, 0 the patch embedding alone. Stages that are never reached get no
        gradient either, so that no parameter waits for one under data-parallel training.
        """
        modules, parameters = self.stage_modules(), self.stage_parameters()
        for i in range(len(modules)):
            if i <= self.frozen_stages or i > self.num_reached:
                for parameter in parameters[i]:
                    parameter.requires_grad_(False)
                for module in modules[i]:
                    module.eval()

    def train(self, mode: bool = True) -> "Backbone":
        """Set the mode; frozen stages stay in evaluation mode."""
        super().train(mode)
        self.freeze()
        return self

    def get_layer_depth(self, name: str, prefix: str = "") -> tuple[int, int]:
        """Place of a parameter for layer-wise learning-rate decay.

        Args:
            name: Name of the parameter.
            prefix: What stands before the backbone's own names (``backbone.``).

        Returns:
            Its depth and the number of depths: 0 the patch embedding with tokens and position
            embeddings, then a depth a block (what stands between stages goes with the block before
            it), last whatever follows, outside too.
        """
        last = self._num_blocks() + 1
        depth = None
        if name.startswith(prefix):
            depth = self._depth_of(name.removeprefix(prefix).split("."))
        return last if depth is None else depth, last + 1

    def _num_blocks(self) -> int:
        """Blocks that count as depths of their own."""
        raise NotImplementedError("abstract")

    def _depth_of(self, parts: list[str]) -> int | None:
        """Depth of the parameter with this dotted name; None for what follows the blocks."""
        raise NotImplementedError("abstract")

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed: all but matrices and kernels."""
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim == 1 or not name.endswith("weight")
        }

    def init_weights(self) -> None:
        """Load ``init_cfg=dict(type='Pretrained', checkpoint=…)`` and log the report.

        Its other fields are those of ``load``. An ``init_cfg`` of another type is mmengine's and
        replaces the tensors that it names, of those that the constructor has initialised.
        Raises ``CheckpointError`` as ``load`` does, and ``ValueError`` for an unknown field.
        """
        cfg = dict(self.init_cfg or {})
        if cfg.pop("type", None) != "Pretrained":
            super().init_weights()
            return
        known = inspect.signature(self.load).parameters.keys()
        if unknown := cfg.keys() - known:
            raise ValueError(
                f"init_cfg has the unknown fields {sorted(unknown)}; known: {', '.join(known)}."
            )
        print_log(str(self.load(**cfg)), logger="current")
        self._is_init = True

    def load(
        self,
        checkpoint: str,
        prefix: str | None = None,
        strict: bool = True,
        weights: str | None = None,
        layout: str | None = None,
        minimum_coverage: float = 50.0,
    ) -> Report:
        """Load a file of any known layout.

        Args:
            checkpoint: Path of the file.
            prefix: What stands before the backbone's names in a whole model; found where None.
            strict: Fail on another architecture, on unexplained tensors and on too little coverage.
            weights: ``model`` or ``ema`` where the file has both; None takes the average.
            layout: Whose names these are where the file leaves it open (``timm``, ``mmseg``, …).
            minimum_coverage: In percent of the backbone's parameters.

        Raises:
            CheckpointError: If the file cannot be read or does not fit.
        """
        file = read(checkpoint, weights)
        found = read_weights(file, str(checkpoint), prefix, layout)
        sizes = {key: value for key, value in found.architecture.known.items() if value is not None}
        self._check_architecture(sizes, str(checkpoint), strict)
        return load_state(
            self,
            found.tensors,
            found.report(str(checkpoint)),
            self.dropped_keys,
            self.initial_keys,
            strict,
            minimum_coverage,
            fit=lambda tensors: self.fit(tensors, sizes),
        )

    def fit(self, tensors: dict[str, Tensor], source: dict[str, Any]) -> dict[str, Tensor]:
        """Resize what needs the known fields of a file's architecture; load hooks do the rest."""
        return tensors

    def _check_architecture(self, theirs: dict[str, Any], source: str, strict: bool) -> None:
        """Compare what a file's tensors tell; another network is refused in any case."""
        own = self.architecture
        if theirs["type"] != own["type"]:
            raise CheckpointError(
                f"Checkpoint {source} is a {theirs['type']}, not a {own['type']}; name another "
                "file or choose that backbone."
            )
        differing = [
            f"{key} is {value} there and {own[key]} here"
            for key, value in theirs.items()
            if key in own and key not in (*RESIZABLE, *self.free_fields) and value != own[key]
        ]
        if strict and differing:
            raise CheckpointError(
                f"Checkpoint {source} is of another architecture: {'; '.join(differing)}; change "
                "the backbone's fields in the config or name another file."
            )


def to_nchw(x: Tensor) -> Tensor:
    """(B, H, W, C) to a contiguous (B, C, H, W), as the necks of dense models expect."""
    return x.permute(0, 3, 1, 2).contiguous()


def init_linear(module: nn.Module) -> None:
    """Truncated normal weights of std 0.02 and zero biases, as all these papers use."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
