"""The tables on both pages equal the records, the command line, and what the kernels' benchmark compares. No GPU."""

import json
import re

import pytest
import torch

import bench
from benchmarks import kernels as kernels_bench
from benchmarks import libraries, pages, plots, records, runner, settings, tables, timing
from benchmarks.operations import OPERATIONS
from test_kernels import DEVICE

PAGES = {page: (settings.ROOT / page).read_text() for page in pages.PAGES}
RECORDS = sorted(settings.RECORDS.glob("*.json"))
FP32 = {"device": "cpu", "dtype": torch.float32}
# For each operation a size that the interpreter runs quickly; no block divides the widths.
TINY = dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy"), (5, 19))
TINY |= {"rope": (2, 3, 4, 2, 8), "linear_cross_entropy": (5, 8, 19), "fp8_linear": (5, 16, 32), "fp8_weight": (5, 19)}
TINY |= {"flash_attention": (2, 19, 4, 2, 16), "adamw": (300,), "adamw8bit": (300,), "nf4": (5, 128)}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf


# --- Pages and records ---


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_equal_the_records(page):
    assert pages.MARKED.search(PAGES[page]) and pages.render(PAGES[page], page) == PAGES[page], "bench.py readme"


def test_every_record_is_on_a_page():
    shown = [name for text in PAGES.values() for name, _ in pages.MARKED.findall(text)]
    assert not [path.stem for path in RECORDS if not any(path.stem.startswith(name) for name in shown)]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_device_versions_and_commit(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith(("python ", "torchrun ")) and record["device"]
    assert {"nanocria", "python", "torch"} <= set(record["versions"])
    assert record["versions"]["nanocria"] != "unknown" and not record["versions"]["nanocria"].endswith("-dirty")


def test_every_plot_is_drawn_from_a_record_and_shown_on_a_page(tmp_path):
    plots.draw_all(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 10_000}
    shown = {name for text in PAGES.values() for name in re.findall(r"^!\[.+\]\(.*?plots/(.+)\)$", text, re.MULTILINE)}
    kept = {path.name for path in plots.FOLDER.iterdir()}
    assert drawn == shown == kept and {record for record, _ in plots.PLOTS.values()} <= {path.stem for path in RECORDS}


def test_a_table_shows_what_a_row_has():
    rows = [{"trainer": "hf", "tok_per_s": 70_000.0, "mfu": None}, {"trainer": "mine", "oom": True}]
    lines = tables.table(rows, "trainer tok_per_s mfu").splitlines()
    assert lines[2:] == ["| Hugging Face | 70,000 | - |", "| `mine` | out of memory | - |"]


def test_losses_are_compared_only_with_float32():
    runs = records.load("losses")["runs"]
    without = tables.losses_table([row for row in runs if row["trainer"] != "float32"])
    assert without.count(" | - | - |") == len(runs) - 1 and tables.losses_table(runs).count(" | - | - |") == 1


# --- The command line ---


USER_ERRORS = """
xyz => Unknown command xyz
kernels --op=rmsnorm => --op=rmsnorm: there are rms_norm,
kernels -- --compile => leave them out
losses --shape=8 => as in 8x2048
finetune => name a folder of published weights
gpus --ranks=two => whole numbers
snapshot -- --offload=all => each measured run sets its own
disk => name a folder
estimate --card=4080 => there are 3060, 3090,
estimate --config=llama32_1 => llama32_1 does not exist. Did you mean
estimate --config=config/baby_llama.py => leaves vocab_size to its dataset
estimate --checkpointing=none -- --mlp_chunks=4 => mlp_chunks
ladder --techniques=nvme => needs a folder on an NVMe drive
run => usage: python bench.py run FOLDER
run /no/such => has no losses
--trainers=al => --trainers=al: there are nanocria, nanocria-fp8,
--memory_limit_gib=0 => it must be above 0
--trainers=hf-masters -- --n_layer=4 => another model
--ranks=64 => torch sees
"""


@pytest.mark.parametrize("case", USER_ERRORS.strip().splitlines())
def test_a_user_error_gets_a_sentence(case):
    words, _, sentence = case.partition(" => ")
    with pytest.raises(SystemExit) as stop:
        bench.main(words.split())
    assert sentence in str(stop.value.code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", ["", "kernels", "step", "ladder", "losses", "gpus", "snapshot"])
def test_without_a_gpu_a_command_says_so(words):
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench.main(words.split())


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_each_command_has_help_made_from_the_comments_of_its_settings(command, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([command, "--help"])
    printed = capsys.readouterr().out
    assert not stop.value.code and re.search(r"^  --\w+ +\w+.* {2}\w", printed, re.MULTILINE), "a name, a type, a value"


def test_only_a_whole_run_replaces_the_record_of_the_readme():
    assert kernels_bench.parse([]).out == settings.RECORDS / "kernels.json"
    assert kernels_bench.parse(["--op=rope,geglu"]).out == settings.ROOT / "out/kernels.json"


# --- What is compared ---


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_functions_compute_the_same(name):
    operation, size = OPERATIONS[name], TINY[name]
    options, most = (FP32 | {"dtype": torch.bfloat16}, 0.1) if name.startswith("fp8") else (FP32, 1e-6)
    most = 4e-3 if name == "nf4" else most  # its result is bfloat16, which the interpreter truncates
    if name == "fp8_weight":  # its functions have no references
        options = options | {"device": DEVICE}
    exact = kernels_bench.exact_results(operation, size, options)
    for peer in {"nanocria", "eager", "torch", "bitsandbytes"} & operation.functions.keys():
        error = kernels_bench.largest_error(operation, operation.functions[peer], size, options, exact)
        assert error < most, f"{name} by {peer}: outputs or gradients are {error:.1e} from float64"


def test_a_function_that_computes_something_else_has_an_error_that_says_so():
    operation, size = OPERATIONS["swiglu"], TINY["swiglu"]
    exact = kernels_bench.exact_results(operation, size, FP32)
    assert kernels_bench.largest_error(operation, OPERATIONS["geglu"].functions["eager"], size, FP32, exact) > 1e-2


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "geglu"])
def test_bytes_are_those_of_the_tensors_that_each_pass_reads_and_writes(name):
    """Forward reads the inputs and writes the outputs; backward reads what is saved and dy and writes the gradients."""
    size, options = TINY[name], {"device": "cpu", "dtype": torch.bfloat16}
    problem = kernels_bench.Problem(OPERATIONS[name], OPERATIONS[name].functions["eager"], size, options)
    outputs = problem.forward()
    inputs = bytes_of(x for x in problem.tensors if x.ndim > 1)  # weights are negligible
    saved = {"rope": 0, "add_rms_norm": inputs // 2}.get(name, inputs)  # a rotation saves nothing, the norm their sum
    gradients = inputs // 2 if name == "add_rms_norm" else inputs  # one tensor serves x and the residual
    work = OPERATIONS[name].work(size)
    assert work["forward"] == {"bytes": inputs + bytes_of(outputs)}
    assert work["backward"] == {"bytes": saved + bytes_of(outputs) + gradients}


def bytes_of(tensors):
    return sum(x.nbytes for x in tensors)


def test_a_failing_function_is_recorded_and_the_others_still_run(monkeypatch):
    def out_of_memory(*inputs):
        raise RuntimeError("CUDA out of memory.\nTried to allocate much.")

    monkeypatch.setattr(timing, "gpu_time", lambda calls: {"us": [1.0, 2.0, 3.0], "graph": True})
    for name in ("host_us", "peak_mib", "sets_to_miss_l2"):
        monkeypatch.setattr(timing, name, lambda argument: 2)
    monkeypatch.setattr(kernels_bench, "BF16_CUDA", FP32)
    monkeypatch.setattr(torch, "compile", lambda eager, **_: out_of_memory)
    limits = {"copy_tb_s": 4.0, "matmul_tflops": 700.0}
    rows = kernels_bench.measure_size("rope", OPERATIONS["rope"], TINY["rope"], limits)
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["functions"]["compile"] == {"failed": "RuntimeError: CUDA out of memory."}
        assert row["functions"]["nanocria"]["us"] == [1.0, 2.0, 3.0] and row["functions"]["nanocria"]["error"] < 1e-6


def test_a_library_that_cannot_be_imported_is_left_out(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no driver")

    def missing():
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    monkeypatch.setattr(libraries, "LIBRARIES", (broken, missing, lambda: {"rope": {}}))
    assert libraries.installed() == [{"rope": {}}]
    assert "no driver" in capsys.readouterr().err


def test_one_size_out_of_memory_does_not_stop_the_others(monkeypatch, tmp_path):
    def measure_size(name, operation, size, limits):
        if size == operation.sizes[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        functions = dict.fromkeys(("nanocria", "eager"), {"us": [1.0, 2.0, 3.0], "host_us": 4.0, "peak_mib": 5.0})
        return [
            {"op": name, "shape": operation.shape(size), "pass": "forward", "floor_us": 1.0, "functions": functions}
        ]

    out = tmp_path / "kernels.json"
    head = {"command": "python bench.py kernels", "device": "GPU", "versions": {"nanocria": "abc"}}
    monkeypatch.setattr(timing, "use_side_stream", lambda: None)
    monkeypatch.setattr(runner, "start", lambda *_, **options: records.Record(out, head))
    monkeypatch.setattr(kernels_bench, "measure_size", measure_size)
    with kernels_bench.functorch_config.patch("donated_buffer", True):  # restores what the benchmark changes
        kernels_bench.main(["--op=rms_norm"])
    assert len(json.loads(out.read_text())["rows"]) == len(OPERATIONS["rms_norm"].sizes) - 1
