import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tlalign_mm.compat import install_mmcv_ext

pytest.importorskip("mmcv")
if not install_mmcv_ext():
    pytest.skip("mmcv brings its compiled ops", allow_module_level=True)

import mmcv._ext as ext  # noqa: E402

REPOSITORY = Path(__file__).parents[2]


class TestInstalledModule:
    def test_is_found_like_any_other(self):
        spec = importlib.util.find_spec("mmcv._ext")
        assert spec.name == "mmcv._ext"
        assert spec.loader is not None  # check_ops_exist of mmcv asks for the loader
        assert sys.modules["mmcv"]._ext is sys.modules["mmcv._ext"] is ext

    def test_installing_again_keeps_it(self):
        assert install_mmcv_ext() is True
        assert sys.modules["mmcv._ext"] is ext

    def test_satisfies_the_wrappers_of_mmcv(self):
        import mmcv.ops

        assert mmcv.ops.nms is not None

    def test_says_that_nothing_was_compiled(self):
        from mmcv.ops import get_compiler_version, get_compiling_cuda_version

        assert get_compiler_version() == "not compiled (torchvision fallback)"
        assert get_compiling_cuda_version() == "not compiled (torchvision fallback)"

    def test_lets_mmengine_look_for_sync_batch_norm(self):
        from mmengine.model import revert_sync_batchnorm

        model = revert_sync_batchnorm(torch.nn.Sequential(torch.nn.SyncBatchNorm(2)))
        assert not isinstance(model[0], torch.nn.SyncBatchNorm)


class TestMissingOp:
    def test_raises_only_when_called(self):
        op = ext.ms_deform_attn_forward
        with pytest.raises(NotImplementedError) as error:
            op(torch.zeros(1), im2col_step=64)
        assert str(error.value) == (
            "mmcv op 'ms_deform_attn_forward' is not supplied by the torchvision fallback; install "
            "mmcv with compiled ops (pip/mim install of an mmcv wheel that matches your torch) to "
            "use it."
        )

    def test_raises_through_the_wrapper_of_mmcv(self):
        from mmcv.ops import nms_match

        with pytest.raises(NotImplementedError, match="'nms_match'"):
            nms_match(torch.rand(3, 5), 0.5)

    @pytest.mark.parametrize("name", ["__wrapped__", "__path__", "__no_such_thing__"])
    def test_double_underscores_are_not_ops(self, name):
        assert not hasattr(ext, name)


class TestWhereItIsNotWanted:
    def test_a_compiled_extension_wins(self, tmp_path, monkeypatch):
        (tmp_path / "mmcv").mkdir()
        (tmp_path / "mmcv" / "__init__.py").touch()
        (tmp_path / "mmcv" / "_ext.py").write_text("compiled = True")
        monkeypatch.delitem(sys.modules, "mmcv")
        monkeypatch.delitem(sys.modules, "mmcv._ext")
        monkeypatch.syspath_prepend(tmp_path)
        assert install_mmcv_ext() is False
        assert importlib.import_module("mmcv._ext").compiled

    def test_without_mmcv_nothing_happens(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "mmcv._ext")
        monkeypatch.setitem(sys.modules, "mmcv", None)  # import mmcv raises ModuleNotFoundError
        assert install_mmcv_ext() is False
        assert "mmcv._ext" not in sys.modules


@pytest.mark.integration
def test_mmdet_models_import_in_a_fresh_process():
    """Even when mmcv.cnn has looked for the ops in vain before."""
    pytest.importorskip("mmdet")
    code = "import mmcv.cnn; import tlalign_mm.compat; import mmdet.models"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
