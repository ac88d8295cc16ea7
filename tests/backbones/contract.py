"""What every backbone promises; a test class of an architecture inherits these and says how to
build it small."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tlalign_mm.backbones import Backbone
from tlalign_mm.checkpoints import Checkpoint, write
from tlalign_mm.labels import draw_cutmix, token_labels


def mixed_labels(backbone: Backbone, batch: int, size: tuple[int, int]) -> Tensor:
    params = draw_cutmix(batch, size, torch.Generator().manual_seed(0), per_sample=True)
    return token_labels(params, backbone.patch_size)


class BackboneContract:
    """Subclasses set the fields and ``build``; sides below are in pixels for patches of 4.

    Attributes:
        strides: Pixels between the tokens of each map that ``build()`` returns.
        channels: Channels of each of these maps.
        compile_backend: ``eager`` captures the graph; ``aot_eager`` also traces its backward pass.
    """

    strides: tuple[int, ...]
    channels: tuple[int, ...]
    compile_backend = "eager"
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
        labels = torch.tensor([0.3, 0.7]).expand(
            2, -(-33 // backbone.patch_size) * -(-50 // backbone.patch_size), 2
        )
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
        noiseless = {"drop_path_rate": 0.0}  # a branch that drops both images gets no gradient
        for backbone in (self.build(**noiseless), self.build_for_pretraining(**noiseless)):
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

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_features_under_autocast_stay_close(self, dtype: torch.dtype) -> None:
        backbone = self.build_for_pretraining().eval()
        images, labels = torch.randn(2, 3, 32, 32), mixed_labels(backbone, 2, (32, 32))
        exact = backbone.forward_features(images, labels)
        with torch.autocast("cpu", dtype):
            rounded = backbone.forward_features(images, labels)
        assert rounded.features.isfinite().all()
        torch.testing.assert_close(
            rounded.features.float(), exact.features, atol=0.1 * exact.features.std().item(), rtol=0
        )
        torch.testing.assert_close(rounded.token_labels, exact.token_labels, atol=1e-2, rtol=0)

    def test_class_attention_is_a_positive_map_without_gradient(self) -> None:
        backbone = self.build_for_pretraining().eval()
        images = torch.randn(2, 3, 33, 50)
        if not backbone.has_class_token:
            with pytest.raises(ValueError, match="class_attention=True needs a class token"):
                backbone.forward_features(images, class_attention=True)
            return
        with torch.autocast("cpu", torch.bfloat16):
            attention = backbone.forward_features(images, class_attention=True).class_attention
        grid = tuple(-(-side // backbone.stride) for side in (33, 50))
        assert attention.shape == (2, *grid)
        assert attention.dtype == torch.float32 and not attention.requires_grad
        assert attention.min() >= 0
        assert (attention.sum((1, 2)) < 1).all(), "the class token's own share is left out"

    def test_blocks_compile_without_graph_breaks(self) -> None:
        torch._dynamo.reset()
        backbone = self.build_for_pretraining().eval()
        images, labels = torch.randn(2, 3, 32, 32), mixed_labels(backbone, 2, (32, 32))
        expected = backbone.forward_features(images, labels)
        compiled = torch.compile(backbone._run, backend=self.compile_backend, fullgraph=True)
        label_map = labels.unflatten(1, (32 // backbone.patch_size,) * 2)
        _, pooled = compiled(images, label_map)
        torch.testing.assert_close(pooled.features, expected.features)
        torch.testing.assert_close(pooled.token_labels, expected.token_labels)

    def test_trains_under_data_parallel_without_unused_parameters(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(self.build(out_indices=(0,), with_cp=True))
            for _ in range(2):  # the second step waits for gradients that the first one missed
                sum(x.sum() for x in model(torch.randn(2, 3, 32, 32))).backward()
        finally:
            dist.destroy_process_group()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert trained and all(p.grad is not None for p in trained)

    def test_bad_rows_of_labels_are_refused(self) -> None:
        backbone = self.build_for_pretraining()
        images, labels = torch.randn(1, 3, 32, 32), mixed_labels(backbone, 1, (32, 32))
        for value in (float("nan"), 0.7, -0.5):
            wrong = labels.clone()
            wrong[0, 1, 0], wrong[0, 1, 1] = value, 0.5
            with pytest.raises(ValueError, match=r"token_labels\[0, 1\] sums to"):
                backbone.forward_features(images, wrong)

    def test_images_smaller_than_a_patch_are_refused(self) -> None:
        with pytest.raises(ValueError, match="images are 3x8 pixels, smaller than a patch"):
            self.build()(torch.randn(1, 3, 3, 8))

    def test_indices_out_of_range_are_refused(self) -> None:
        stages = len(self.build().num_features)
        with pytest.raises(ValueError, match=f"must lie in 0 … {stages - 1}"):
            self.build(out_indices=(0, stages))

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
        assert set(range(last)) <= {depth for depth, _ in depths} <= set(range(last + 1))
        assert backbone.get_layer_depth("decode_head.conv.weight", "backbone.")[0] == last

    def test_no_decay_names_exist_and_leave_the_matrices(self) -> None:
        backbone = self.build()
        parameters = dict(backbone.named_parameters())
        skipped = backbone.no_weight_decay()
        assert skipped <= parameters.keys()
        decayed = parameters.keys() - skipped
        assert decayed and all(parameters[name].ndim > 1 for name in decayed)
        assert all(name.endswith("weight") for name in decayed)
