"""What every backbone promises; a test class of an architecture inherits these and says how to
build it small."""

import pytest
import torch
from torch import Tensor, nn

from tlalign_mm.backbones import Backbone
from tlalign_mm.checkpoints import Checkpoint, write
from tlalign_mm.labels import draw_cutmix, token_labels


def mixed_labels(backbone: Backbone, batch: int, size: tuple[int, int]) -> Tensor:
    params = draw_cutmix(batch, size, torch.Generator().manual_seed(0), per_sample=True)
    return token_labels(params, backbone.patch_size)


class BackboneContract:
    """Subclasses set the fields and ``build``."""

    strides: tuple[int, ...]
    channels: tuple[int, ...]
    sizes = [(32, 32), (64, 64), (4, 4), (33, 50), (20, 7)]

    def build(self, **kwargs: object) -> Backbone:
        raise NotImplementedError("abstract")

    def build_for_pretraining(self, **kwargs: object) -> Backbone:
        return self.build(out_indices=(), **kwargs)

    @pytest.mark.parametrize("size", sizes)
    def test_maps_have_the_promised_strides_and_channels(self, size: tuple[int, int]) -> None:
        maps = self.build()(torch.randn(2, 3, *size))
        assert isinstance(maps, tuple)
        for x, stride, channels in zip(maps, self.strides, self.channels, strict=True):
            assert x.shape == (2, channels, *(-(-side // stride) for side in size))
            assert x.is_contiguous()

    @pytest.mark.parametrize("size", sizes)
    @pytest.mark.parametrize("batch", [1, 3])
    def test_labels_stay_distributions_at_any_size(self, size: tuple[int, int], batch: int) -> None:
        backbone = self.build_for_pretraining().eval()
        pooled = backbone.forward_features(
            torch.randn(batch, 3, *size), mixed_labels(backbone, batch, size)
        )
        labels = pooled.token_labels
        assert labels.dtype == torch.float32 and not labels.requires_grad
        assert labels.min() >= 0
        torch.testing.assert_close(labels.sum(-1), torch.ones(batch))

    def test_equal_labels_stay_equal_even_with_padding(self) -> None:
        backbone = self.build_for_pretraining()
        labels = torch.tensor([0.3, 0.7]).expand(2, -(-33 // 4) * -(-50 // 4), 2)
        pooled = backbone.forward_features(torch.randn(2, 3, 33, 50), labels)
        torch.testing.assert_close(pooled.token_labels, labels[:, 0])

    def test_labels_are_linear_and_k_shares_equal_k_classes(self) -> None:
        backbone = self.build_for_pretraining().eval()
        images = torch.randn(2, 3, 32, 32)
        shares = mixed_labels(backbone, 2, (32, 32))
        expansion = torch.rand(2, 5).softmax(-1)  # own image and partner to five classes
        one = backbone.forward_features(images, shares).token_labels @ expansion
        other = backbone.forward_features(images, shares @ expansion).token_labels
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)

    def test_features_do_not_depend_on_labels(self) -> None:
        backbone = self.build_for_pretraining().eval()
        images = torch.randn(2, 3, 32, 32)
        plain = backbone.forward_features(images)
        labelled = backbone.forward_features(images, mixed_labels(backbone, 2, (32, 32)))
        assert plain.token_labels is None
        torch.testing.assert_close(labelled.features, plain.features)

    def test_every_parameter_gets_a_gradient(self) -> None:
        for backbone in (self.build(), self.build_for_pretraining()):
            images = torch.randn(2, 3, 64, 64)
            if backbone.out_indices:
                outputs = backbone(images)
            else:
                labels = mixed_labels(backbone, 2, (64, 64))
                outputs = backbone.forward_features(images, labels)[:1]
            sum((x * torch.randn_like(x)).sum() for x in outputs).backward()
            idle = [n for n, p in backbone.named_parameters() if p.grad is None or not p.grad.any()]
            assert not idle

    def test_checkpointing_changes_nothing(self) -> None:
        results = []
        for with_cp in (False, True):
            torch.manual_seed(0)
            backbone = self.build_for_pretraining(with_cp=with_cp).train()
            images, labels = torch.randn(2, 3, 32, 32), mixed_labels(backbone, 2, (32, 32))
            features, moved, *_ = backbone.forward_features(images, labels)
            features.square().sum().backward()
            results.append([features, moved, *(p.grad for p in backbone.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)

    def test_autocast_keeps_labels_in_float32(self) -> None:
        backbone = self.build_for_pretraining().eval()
        images, labels = torch.randn(2, 3, 32, 32), mixed_labels(backbone, 2, (32, 32))
        exact = backbone.forward_features(images, labels).token_labels
        with torch.autocast("cpu", torch.bfloat16):
            moved = backbone.forward_features(images, labels).token_labels
        assert moved.dtype == torch.float32
        torch.testing.assert_close(moved, exact, atol=1e-2, rtol=0)
        torch.testing.assert_close(moved.sum(-1), torch.ones(2))

    def test_freezing_holds_from_construction_on(self) -> None:
        for frozen in range(-1, len(self.strides) + 1):
            backbone = self.build(frozen_stages=frozen)
            for i, modules in enumerate(backbone.stage_modules()):
                is_frozen = i <= frozen
                parameters = nn.ModuleList(modules).parameters()
                assert all(p.requires_grad != is_frozen for p in parameters)
            assert backbone.train() is backbone
            for i, modules in enumerate(backbone.stage_modules()):
                assert all(m.training == (i > frozen) for m in modules)

    def test_pretrained_weights_are_really_those_of_the_file(self, tmp_path) -> None:
        torch.manual_seed(1)
        source = self.build_for_pretraining()
        path = write(
            tmp_path / "backbone.safetensors",
            Checkpoint(source.state_dict(), "tlalign_mm", source.architecture),
        )
        torch.manual_seed(2)
        dense = self.build(init_cfg={"type": "Pretrained", "checkpoint": str(path)})
        dense.init_weights()
        tensors, loaded = source.state_dict(), dense.state_dict()
        shared = tensors.keys() & loaded.keys()
        assert len(shared) > 0.8 * len(loaded)
        assert all(torch.equal(tensors[name], loaded[name]) for name in shared)

    def test_labels_of_the_wrong_length_are_refused(self) -> None:
        backbone = self.build_for_pretraining()
        with pytest.raises(ValueError, match=r"token_labels have shape \(1, 5, 2\)"):
            backbone.forward_features(torch.randn(1, 3, 32, 32), torch.rand(1, 5, 2))

    def test_layer_depth_covers_every_parameter_in_order(self) -> None:
        backbone = self.build()
        depths = [
            backbone.get_layer_depth(f"backbone.{n}", "backbone.")
            for n, _ in backbone.named_parameters()
        ]
        last = depths[0][1] - 1
        assert {number for _, number in depths} == {last + 1}
        assert {depth for depth, _ in depths} == set(range(last + 1))
        assert backbone.get_layer_depth("decode_head.conv.weight", "backbone.")[0] == last

    def test_no_decay_names_exist_and_leave_the_matrices(self) -> None:
        backbone = self.build()
        parameters = dict(backbone.named_parameters())
        skipped = backbone.no_weight_decay()
        assert skipped <= parameters.keys()
        decayed = parameters.keys() - skipped
        assert decayed and all(parameters[name].ndim > 1 for name in decayed)
        assert all(name.endswith("weight") for name in decayed)
