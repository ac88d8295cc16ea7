"""A model of whatever library, and what it makes of images under names that all of them share.

Hooks catch the last block of every stage and the norms, so that no library's own choice of outputs
matters. Double precision keeps rounding from being taken for a difference. Tokens are (B, N, C) in
row-major order, prefix tokens first.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlalign_mm.proof.anatomy import Size, anatomy, strides

Classifier = tuple[Tensor, Tensor | None]  # weight and bias
AVERAGED = ("SwinTransformer", "PyramidVisionTransformerV2")  # classify the mean of the last map
MOST_PREFIX = 2  # class and distillation token


@dataclass
class Side:
    """One of the two models of a comparison.

    Attributes:
        who: Whose class it is: ``timm``, ``mmseg``, ``mmdet``, ``mmpretrain`` or ``ours``.
        architecture: Our class as ``type``, and the sizes.
        model: With the weights, in double precision.
        classifiers: (weight, bias) of the file's classifiers, the distillation token's second.
        gives_logits: Whether the model has its classifiers itself.
        initial: Names of the model's tensors that no weights were given for.
        unused: Names of the weights that have no place in it, on purpose.
        notes: What a reader should know.
        own_rule: What it does otherwise where it runs by itself, in words, or None.
        prepare: Called with the image size, and whether the own rule holds, before it runs.
    """

    who: str
    architecture: dict[str, Any]
    model: nn.Module
    classifiers: list[Classifier] = field(default_factory=list)
    gives_logits: bool = False
    initial: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own_rule: str | None = None
    prepare: Callable[[Size, bool], None] | None = None
    _known: dict[tuple[Size, bool], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        """Whose class, and which."""
        whose = "our" if self.who == "ours" else f"{self.who}'s"
        return f"{whose} {type(self.model).__name__}"

    def outputs(self, size: Size, own: bool = False) -> dict[str, Tensor]:
        """What it makes of a random image of this size; computed once.

        Args:
            size: Height and width.
            own: Run it by the rule that is its own.

        Returns:
            ``stage i``: (1, N, C) tokens, normalised over channels so that differences are absolute
            and of order 1; ``norm i``: the map behind a norm; ``pooled``: (1, C) behind the final
            norm; ``distilled``: the same of the distillation token; ``logits``.
        """
        if (size, own) not in self._known:
            self._known[size, own] = self._run(size, own)
        return self._known[size, own]

    @torch.no_grad()
    def _run(self, size: Size, own: bool) -> dict[str, Tensor]:
        if self.prepare is not None:
            self.prepare(size, own)
        parts = anatomy(self.who, self.architecture["type"], self.model)
        numbers = [-(-size[0] // s) * -(-size[1] // s) for s in strides(self.architecture)]
        self.model.eval()
        with _catch(self.model, [*parts.stages, *parts.norms.values()]) as caught:
            output = self.model(random_images(size))
        found = {}
        for i, (stage, number) in enumerate(zip(parts.stages, numbers, strict=True)):
            tokens = _tokens(caught[stage])[:, -number:]
            found[f"stage {i + 1}"] = F.layer_norm(tokens, tokens.shape[-1:])
            norm = parts.norms.get(i)
            if norm in caught and f"{norm}.weight" not in self.initial:
                prefix, patches = _split(_tokens(caught[norm]), number)
                found |= {} if patches is None else {f"norm {i + 1}": patches}
                found |= self._classify(prefix, patches) if norm == parts.final else {}
        return found | ({"logits": output} if self.gives_logits else {})

    def _classify(self, prefix: Tensor, patches: Tensor | None) -> dict[str, Tensor]:
        """What the final norm gives a classifier, and the classifiers' mean."""
        if self.architecture["type"] in AVERAGED:
            pooled = [patches.mean(1)]
        else:
            pooled = list(prefix.unbind(1))
        found = dict(zip(("pooled", "distilled"), pooled, strict=False))
        if self.classifiers and len(self.classifiers) == len(pooled):
            pairs = zip(pooled, self.classifiers, strict=True)
            found["logits"] = torch.stack([F.linear(x, *c) for x, c in pairs]).mean(0)
        return found


def random_images(size: Size) -> Tensor:
    """(1, 3, H, W) in double precision, the same at every call."""
    images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
    return images.double()


@contextmanager
def _catch(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Keep what these modules return."""
    caught: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: caught.__setitem__(name, output)

    hooks = [model.get_submodule(n).register_forward_hook(keep(n)) for n in dict.fromkeys(names)]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def _tokens(output: Any) -> Tensor:
    """(B, N, C) of tokens, a (B, H, W, C) map or one token (B, C); ours return labels as well."""
    first = output[0] if isinstance(output, tuple) else output
    return first[:, None] if first.ndim == 2 else first.flatten(1, -2)


def _split(tokens: Tensor, number: int) -> tuple[Tensor, Tensor | None]:
    """Prefix tokens, and the patch tokens where the norm saw them."""
    if tokens.shape[1] <= MOST_PREFIX:
        return tokens, None
    return tokens[:, :-number], tokens[:, -number:]
