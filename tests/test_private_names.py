"""PyTorch's private names: which are used, and what happens if a version of it lacks them."""

import re

import pytest
import torch

from kernels.fp8_linear import use_fp8
from kernels.launch import saved_is_ours
from model import Llama, LlamaConfig
from tests.runs import LONGER, ROOT, finish, losses, run_ranks, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

USED = {  # by file; test_copy_engines.py does without symmetric memory
    "kernels/fp8_linear.py": {"_scaled_mm"},
    "kernels/launch.py": {"_C"},
    "optimizers/on_device.py": {"_foreach_norm"},
    "runtime/copy_engines.py": {"_symmetric_memory"},
    "runtime/distributed.py": {"_spec"},
    "runtime/memory_stats.py": {"_C", "_dump_snapshot", "_record_memory_history"},
}


def test_these_private_names_of_pytorch_are_used_and_no_others():
    private, found = re.compile(r"\b(?:torch|dist|like|x|parameter)(?:\.[a-z]\w*)*\.(_[A-Za-z]\w*)"), {}
    places = ("*.py", "kernels/*.py", "optimizers/*.py", "runtime/*.py", "data/**/*.py")
    for path in (path for place in places for path in ROOT.glob(place)):
        names = set(private.findall(path.read_text()))
        found |= {str(path.relative_to(ROOT)): names} if names else {}
    assert found == USED


def test_without_a_private_name_a_run_computes_the_same(text_data, tmp_path):
    settings = LONGER | dict(dataset=text_data, max_iters=3, keep_last=0)
    script = wrapped(tmp_path, "del torch._foreach_norm")
    for out_dir, program in (("with", "train.py"), ("without", script)):
        finish(settings | dict(out_dir=tmp_path / out_dir), 1, program)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_a_pytorch_without_the_dtensor_constructor_ends_the_run_with_a_message(text_data, tmp_path):
    other = (
        "import runtime.distributed as d; Real = d.DTensor\n"
        "class Kind(type): __instancecheck__ = lambda self, x: isinstance(x, Real)\n"
        "d.DTensor = Kind('DTensor', (), {})"
    )
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", offload="all", offload_dir=tmp_path)
    done = run_ranks(2, settings, wrapped(tmp_path, other))
    said = f"rank 0: PyTorch {torch.__version__} cannot build a DTensor from a part: DTensor() takes no arguments\n"
    assert done.returncode == 1 and done.stderr.endswith(said) and "Traceback" not in done.stderr, done.stderr


def test_without_knowing_whether_the_graph_is_kept_a_backward_overwrites_nothing(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert not saved_is_ours()


def test_without_fp8_s_matmul_the_setting_is_refused(monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    with torch.device("meta"):
        model = Llama(LlamaConfig(n_layer=1, n_head=1, n_kv_head=1, n_embd=16, ffn_dim=16, vocab_size=16, block_size=8))
    with pytest.raises(ValueError, match=r"has no torch._scaled_mm, which fp8 needs: --fp8=false"):
        use_fp8(model, "cuda:0")
