"""The models that a checkpoint's tensors belong to, built and loaded without this package's tables.

timm's classes take timm's files and, through timm's own filters, official ones; official PVT goes
through mmdetection's own converter. Where a library is not installed ours stands in, which is said.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tlalign_mm.backbones.pvt import stage_grids
from tlalign_mm.backbones.rebuild import rebuild
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read_weights
from tlalign_mm.checkpoints.convert import HEADS
from tlalign_mm.proof.anatomy import MM
from tlalign_mm.proof.sides import Classifier, Side
from tlalign_mm.proof.stock import build_stock, set_published_eps
from tlalign_mm.proof.stock_fields import LIBRARIES
from tlalign_mm.proof.timm_models import build_timm_model, take_any_size

DENSE = ("mmseg", "mmdet")  # have no classifiers
CLASSIFIERS = (("head", "head.fc", "head.layers.head"), ("head_dist", "head.layers.head_dist"))
BUFFERS = (r".*\.attn_mask", r".*\.relative_position_index")
TOKENS = {
    "dist_token": "the distillation token, which takes part in every block: not every side has it",
    "cls_token": "the class token, which takes part in the last stage: not every side has it",
}
NORMS = (r"norm\d?\.(weight|bias)",)


class Part(NamedTuple):
    """Tensors of one side of a comparison.

    Attributes:
        layout: Whose names these are, one of ``LAYOUTS``.
        architecture: Our class as ``type``, and the sizes.
        tensors: By bare names, a classifier's ``head…`` with them.
    """

    layout: str
    architecture: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def family(self) -> str:
        """Our class."""
        return self.architecture["type"]

    @property
    def who(self) -> str:
        """Whose class they belong to, as far as it is installed."""
        official = "mmdet" if self.family == "PyramidVisionTransformer" else "timm"
        who = official if self.layout == "official" else self.layout
        return "ours" if who == "tlalign_mm" or who in MM and not is_installed(who) else who


class Form(NamedTuple):
    """What the networks of both sides have.

    Attributes:
        is_dense: Whether one of them gives maps alone.
        class_token: Whether the last stage of PVT has its class token.
        distilled: Whether a vision transformer has its distillation token.
    """

    is_dense: bool
    class_token: bool
    distilled: bool


@cache
def is_installed(library: str) -> bool:
    """Whether an mm library can be imported; importing it registers its backbones."""
    try:
        import_module(f"{library}.models")
    except (ImportError, AssertionError):  # the latter for another version of mmcv
        return False
    return True


def common_form(*parts: Part) -> Form:
    """The most that all of them have."""
    is_dense = any(part.layout in DENSE or part.who in DENSE for part in parts)
    tokens = {name: all(name in p.tensors for p in parts) for name in ("cls_token", "dist_token")}
    return Form(is_dense, tokens["cls_token"] and not is_dense, tokens["dist_token"])


def build_side(part: Part, form: Form) -> Side:
    """Build the model that these tensors belong to, and load every one of them.

    Args:
        part: The tensors.
        form: What the model must do without is left out, and named in ``unused``.

    Raises:
        CheckpointError: If a tensor has no place in the model or the model lacks one, but for what
            is left out on purpose and norms that the layout does not have.
    """
    reduced = part
    if part.family == "VisionTransformer" and not form.distilled:
        reduced = _without_distillation(part)
    if part.family == "PyramidVisionTransformer" and not form.class_token:
        reduced = _without_class_token(part)
    side = {"timm": _timm, "ours": _ours}.get(part.who, _stock)(reduced, form)
    left_out = [name for name in part.tensors if name not in reduced.tensors]
    side.notes += [f"compared without {TOKENS[name]}" for name in left_out if name in TOKENS]
    side.unused += left_out
    return side


def _without_distillation(part: Part) -> Part:
    """A vision transformer's tensors without the token, its position and its classifier."""
    tensors = _without(part.tensors, "dist_token", r"head(\.layers\.head)?_dist\..*")
    if "dist_token" in part.tensors:
        positions = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    return Part(part.layout, {**part.architecture, "distilled": False}, tensors)


def _without_class_token(part: Part) -> Part:
    """PVT's tensors in the form of dense tasks, under official names; no others have a token."""
    sizes, tensors = part.architecture, _without(part.tensors, "cls_token", *NORMS, r"head\..*")
    stages = len(sizes["depths"])
    height, width = stage_grids(sizes["img_size"], sizes["patch_size"], stages)[-1]
    if (name := f"pos_embed{stages}") in tensors:
        tensors[name] = tensors[name][:, -height * width :]
    return Part(part.layout, sizes, tensors)


def _without(tensors: Mapping[str, Tensor], *patterns: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not _matches(name, patterns)}


def _timm(part: Part, form: Form) -> Side:
    classifiers = _classifiers(part.tensors)
    num_classes = len(classifiers[0][0]) if classifiers else 0
    model, tensors = build_timm_model(
        part.architecture, part.tensors, num_classes, part.layout == "official"
    )
    side = Side("timm", part.architecture, model, gives_logits=bool(classifiers))
    load_exactly(side, tensors, ("cls_token", *NORMS), (*BUFFERS, *NORMS))
    take_any_size(side)
    return side


def _ours(part: Part, form: Form) -> Side:
    tensors, notes = part.tensors, []
    if part.layout != "tlalign_mm":
        file = Checkpoint(tensors, part.layout, part.architecture)
        found = read_weights(file, "to be verified", prefix="")
        tensors = found.tensors | {name: tensors[name] for name in found.translation.unknown}
        library = LIBRARIES.get(part.layout, "mmdetection")
        notes = [f"{library} cannot be imported: our network stands in for its own"]
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEADS)}
    model = rebuild(part.architecture, body, **_our_fields(part, form, body))
    side = Side("ours", part.architecture, model, _classifiers(tensors), notes=notes)
    load_exactly(side, body, model.initial_keys, model.dropped_keys)
    return side


def _our_fields(part: Part, form: Form, names: Iterable[str]) -> dict[str, Any]:
    """Fields under which ours computes what the other side does."""
    sizes = part.architecture
    if "Swin" in part.family:
        return {"always_shift": form.is_dense}
    if part.family == "PyramidVisionTransformer" and not form.class_token:
        return {"out_indices": tuple(range(len(sizes["depths"])))}
    if part.family == "VisionTransformer" and form.is_dense:
        return {"out_indices": (sizes["depth"] - 1,), "final_norm": "norm.weight" in names}
    return {}


def _stock(part: Part, form: Form) -> Side:
    tensors, who = part.tensors, part.who
    model = build_stock(part.architecture, who, tensors)
    if part.layout == "official":
        tensors = import_module(type(model).__module__).pvt_convert(tensors)
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith("head")}
    side = Side(who, part.architecture, model, _classifiers(tensors))
    load_exactly(side, body, ("cls_token", *NORMS, BUFFERS[1]), ())
    if part.family == "XCiT":  # mmpretrain makes positions in single precision, come what may
        project = model.pos_embed.token_projection
        project.register_forward_pre_hook(lambda _module, inputs: inputs[0].double())
    norms = set_published_eps(model) if who == "mmdet" and "Pyramid" in part.family else []
    if norms:
        side.own_rule = (
            f"mmdetection has an eps of 1e-6 in {len(norms)} norms where 1e-5 is published"
        )
        side.prepare = lambda _size, own: _set_eps(model, norms, 1e-6 if own else 1e-5)
    return side


def _set_eps(model: nn.Module, norms: Iterable[str], eps: float) -> None:
    for name in norms:
        model.get_submodule(name).eps = eps


def _classifiers(tensors: Mapping[str, Tensor]) -> list[Classifier]:
    """Weight and bias of the classifier, then of the distillation token's."""
    doubled = {name: tensor.double() for name, tensor in tensors.items() if "head" in name}
    found = [n for names in CLASSIFIERS for n in names if f"{n}.weight" in tensors]
    return [(doubled[f"{n}.weight"], doubled.get(f"{n}.bias")) for n in found]


def load_exactly(
    side: Side, tensors: Mapping[str, Tensor], initial: Iterable[str], unused: Iterable[str]
) -> None:
    """Load tensors by name and note what is left on either side.

    Args:
        side: Whose model it is.
        tensors: Under the model's names.
        initial: Patterns of names that only the model may have.
        unused: Patterns of names that only the tensors may have.

    Raises:
        CheckpointError: If any other name is on one side alone, or a shape does not fit.
    """
    own = side.model.state_dict()
    side.initial += [name for name in own if name not in tensors]
    side.unused += [name for name in tensors if name not in own]
    missing = [name for name in side.initial if not _matches(name, initial)]
    left = [name for name in side.unused if not _matches(name, unused)]
    if missing or left:
        raise CheckpointError(
            f"The tensors are not those of {side.title}: {len(missing)} are missing {missing[:4]} "
            f"and {len(left)} have no place {left[:4]}; check --from and --arch."
        )
    side.model.double()  # before its positions are resized or its weights used
    try:
        side.model.load_state_dict({n: t for n, t in tensors.items() if n in own}, strict=False)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"The tensors do not fit {side.title}: {reason} Check --from and --arch."
        ) from error


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
