"""The kernels as a folder of their own, loaded by its path under another name, as Hugging Face's `kernels` does."""

import json
import subprocess
import sys

import pytest

from scripts import export_kernels
from tests.runs import told
from tests.test_checkpoint import size_limit
from training.provenance import ROOT

USE = """
import importlib.util, sys, torch
path = sys.argv[1]
spec = importlib.util.spec_from_file_location("loaded_kernel", path + "/__init__.py", submodule_search_locations=[path])
module = sys.modules["loaded_kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "kernels" not in sys.modules
torch.manual_seed(0)
q, k, v = (torch.randn(1, 5, heads, 16) for heads in (2, 1, 1))
sinks, heads_first = torch.ones(2), [x.transpose(1, 2) for x in (q, k, v)]
for causal, window in ((True, (2, 0)), (False, (1, 2))):
    o = module.flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal, window_size=(window[0], 2), s_aux=sinks)
    theirs = module.naive_attention(*heads_first, scale=0.3, causal=causal, window=window, sinks=sinks)
    torch.testing.assert_close(o, theirs.transpose(1, 2))
starts = torch.tensor([0, 2, 5], dtype=torch.int32)
o = module.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 3, 3, softcap=2.0)
theirs = module.naive_attention_varlen(q[0], k[0], v[0], starts, starts, 3, 3, softcap=2.0)
torch.testing.assert_close(o, theirs)
dense = module.flash_attn_func, (q, k, v)
packed = module.flash_attn_varlen_func, (q[0], k[0], v[0], starts, starts, 3, 3)
for (call, given), lse_shape in ((dense, (1, 2, 5)), (packed, (2, 5))):
    o, lse, probs = call(*given, return_attn_probs=True)
    assert torch.equal(o, call(*given)) and lse.shape == lse_shape and probs is None

sys.path.insert(0, sys.argv[2])  # and beside it ours, in one process
import kernels
ours = kernels.flash_attention(*heads_first, causal=True)
torch.testing.assert_close(ours, module.flash_attn_func(q, k, v, causal=True).transpose(1, 2), rtol=0, atol=0)
"""


def test_loaded_by_its_path_under_another_name(tmp_path, capsys):
    settings = export_kernels.KernelExportSettings(str(tmp_path / "kernel"))
    export_kernels.main.__wrapped__(settings, tmp_path)
    variant = tmp_path / "kernel" / "build" / "torch-cuda"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata.keys() == {"name", "id", "version", "license", "python-depends", "backend"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["id"] == metadata["id"]
    command = [sys.executable, "-c", USE, str(variant), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="exists and is not an empty folder; give another, nothing is overwritten"):
        export_kernels.main.__wrapped__(settings, tmp_path)
    inside = str(ROOT / "kernels" / "mine")
    with pytest.raises(ValueError, match=rf"^folder={inside} lies in {ROOT}/kernels, which is copied; give one"):
        export_kernels.main.__wrapped__(export_kernels.KernelExportSettings(inside), tmp_path)
    with pytest.raises(ValueError, match="folder= is not given"):
        export_kernels.main.__wrapped__(export_kernels.KernelExportSettings(), tmp_path)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    """It listed every file, and left a part of them in the folder, which was then refused."""
    with size_limit(1000):
        done = told("scripts.export_kernels", [f"folder={tmp_path / 'kernel'}"], monkeypatch, capsys)
    line = f"error: {tmp_path / 'kernel'} cannot be used (File too large); check that path, or name another\n"
    assert (done.code, done.error, list(tmp_path.iterdir())) == (2, line, [])
