"""Training steps that differ in nothing but the labels of their mixed images.

The baseline is plain CutMix on timm's own model with timm's mixing and loss. ``published`` is
TL-Align as it was published: class-sized labels through the explicit attention of timm's model.
"""

from collections.abc import Callable

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from tlalign_mm.analysis.measure import Step
from tlalign_mm.labels import MixParams, apply_mix, draw_cutmix, smoothed_one_hot, token_labels
from tlalign_mm.pretrain import ImageClassifier
from tlalign_mm.proof.replay import LabelReplay
from tlalign_mm.proof.twins import TWINS, build_ours, build_timm, our_config

BASELINE = "cutmix (timm)"
OURS = {"area": "area", "transmix": "transmix", "tl-align": "tl_align"}
PUBLISHED = "tl-align (published)"
CLASSES = 1000
Loss = Callable[[Tensor, Tensor], Tensor]


def methods(arch: str) -> list[str]:
    """Names of the steps that exist for an architecture; TransMix needs a class token."""
    with torch.device("meta"):
        has_class_token = build_ours(TWINS[arch]).has_class_token
    ours = [name for name in OURS if name != "transmix" or has_class_token]
    return [BASELINE, *ours, PUBLISHED]


def build_step(
    method: str, arch: str, batch: int, size: int, amp: str | None = None, device: str = "cpu"
) -> Step:
    """A whole training step: mixing, forward, loss, backward, AdamW.

    Args:
        method: One of ``methods(arch)``.
        arch: A key of ``TWINS``.
        batch: Images a step, an even number.
        size: Side of the images in pixels.
        amp: ``bf16`` or ``fp16`` for autocast, or None.
        device: ``cpu`` or ``cuda``.
    """
    torch.manual_seed(0)
    if method in (BASELINE, PUBLISHED):
        model = build_timm(TWINS[arch], size, CLASSES)
        loss = {BASELINE: _cutmix_loss, PUBLISHED: _published_loss}[method](model, arch)
    else:
        model = ImageClassifier(our_config(TWINS[arch], size), CLASSES, OURS[method])
        loss = _our_loss(model)
    model.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device)
    classes = torch.randint(CLASSES, (batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[amp]

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            value = loss(images, classes)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cutmix_loss(model: nn.Module, _arch: str) -> Loss:
    mix = Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    criterion = SoftTargetCrossEntropy()

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        mixed, targets = mix(images.clone(), classes)  # it pastes in place
        return criterion(model(mixed), targets)

    return loss


def _published_loss(model: nn.Module, arch: str) -> Loss:
    replay = LabelReplay(model)
    with torch.device("meta"):
        ours = build_ours(TWINS[arch])
    criterion, generator = SoftTargetCrossEntropy(), torch.Generator()

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        size = (images.shape[2], images.shape[3])
        params = draw_cutmix(len(images), size, generator, cell=ours.patch_size)
        params = MixParams(*(tensor.to(images.device) for tensor in params))
        targets = smoothed_one_hot(classes, CLASSES, 0.1)
        pairs = torch.stack([targets, targets[params.partner]], dim=1)  # (B, 2, classes)
        grid = tuple(-(-side // ours.patch_size) for side in size)
        replay.start(token_labels(params, ours.patch_size) @ pairs, grid)
        logits = model(apply_mix(images, params))
        return criterion(logits, replay.label(ours.has_class_token))

    return loss


def _our_loss(model: ImageClassifier) -> Loss:
    generator = torch.Generator()

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        params = draw_cutmix(len(images), (images.shape[2], images.shape[3]), generator)
        params = MixParams(*(tensor.to(images.device) for tensor in params))
        return model(apply_mix(images, params), classes, params, mode="loss")["loss"]

    return loss
