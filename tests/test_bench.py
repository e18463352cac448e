"""The pages' tables and plots come from the records, the command line, and what the kernels' benchmark compares."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from matplotlib.text import Text
from torch.utils.flop_counter import FlopCounterMode

import bench
from benchmarks import kernels as kernels_bench
from benchmarks import plots, records, runner, settings, tables, timing
from benchmarks.operations import OPERATIONS
from test_kernels import DEVICE

FP32 = {"device": "cpu", "dtype": torch.float32}
# For each operation a size that the interpreter runs quickly; no block divides the widths.
TINY = dict.fromkeys(("rms_norm", "add_rms_norm", "swiglu", "geglu", "cross_entropy"), (5, 19))
TINY |= {"rope": (2, 3, 4, 2, 8), "linear_cross_entropy": (5, 8, 19), "fp8_linear": (5, 16, 32), "fp8_weight": (5, 19)}
TINY |= {"flash_attention": (2, 19, 4, 2, 16), "adamw": (300,), "adamw8bit": (300,), "nf4": (5, 128)}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf


def test_the_tables_of_the_page_equal_the_records():
    text = tables.README.read_text()
    assert tables.MARKED.search(text) and tables.render(text) == text, "python bench.py readme writes them"
    record = settings.load_record("finetune")
    now = record | {"command": "python bench.py sweep --preset=finetune"}  # as records say today
    assert tables.of_record(now) == tables.of_record(record)


@pytest.mark.parametrize("name", plots.PLOTS)
@plots.plt.rc_context(plots.STYLE_OF_ALL)
def test_a_plot_of_a_record_can_be_read_at_the_width_of_the_page(name):
    """Letters are 11 pixels or more if the page shows it 830 pixels wide, and neither labels nor looks coincide."""
    assert {f"{plot}.png" for plot in plots.PLOTS} == {path.name for path in plots.PLOT_FOLDER.iterdir()}
    record, plot = plots.PLOTS[name]
    figure = plot(settings.load_record(record))
    figure.draw_without_rendering()
    pixels = 830 / figure.get_window_extent().width * figure.dpi / 72
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) * pixels >= 11
    for axes in figure.axes:
        labels = [text.get_window_extent() for text in axes.texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
        looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines if len(line.get_xdata()) > 1]
        assert len(looks) == len(set(looks)), "two lines look the same"


def test_trainers_of_the_same_title_have_a_column_each():
    point = {"batch": 8, "block": 2048, "peak_gib": 1.0}
    rows = [point | {"trainer": "hf", "tok_per_s": 5.0}, point | {"trainer": "hf-masters", "tok_per_s": 6.0}]
    assert tables.side_by_side(rows).splitlines()[-1] == "| 8 | 2,048 | 5 · 1.0 | 6 · 1.0 |"


USER_ERRORS = """
xyz => Unknown command xyz
kernels -- --compile => Unknown setting --
step --shapes=8 => --shapes=8: write numbers, a shape as in 8x2048
disk => name a folder
plan --ranks=4 => Unknown setting ranks
estimate --card=gt710 => there are 3060, 3070, 3080, 3090, 4060, 4060ti,
estimate --config=config/baby_llama.py => leaves vocab_size to its dataset
estimate --ranks=0 => ranks is 0: it must be at least 1
estimate --batch_size=0 => batch_size is 0: it must be at least 1
run => usage: python bench.py run FOLDER
--trainers=al => --trainers=al: there are nanocria, nanocria-fp8,
--trainers=hf-masters -- --n_layer=4 => each measured run sets its own
"""


@pytest.mark.parametrize("case", USER_ERRORS.strip().splitlines())
def test_a_user_error_gets_a_sentence(case):
    words, _, sentence = case.partition(" => ")
    with pytest.raises(SystemExit) as stop:
        bench.main(words.split())
    assert sentence in str(stop.value.code)


# --- What is compared ---


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_functions_compute_the_same(name):
    operation = OPERATIONS[name]
    options = FP32
    most = 1e-6
    if name.startswith("fp8"):
        options = {"device": "cpu", "dtype": torch.bfloat16}
        most = 0.1
    if name == "fp8_weight":  # its functions have no references
        options = options | {"device": DEVICE}
    if name == "nf4":
        most = 4e-3  # its result is bfloat16, which the interpreter truncates
    exact = kernels_bench.exact_results(operation, TINY[name], options)
    peers = {"nanocria", "eager", "torch"} & operation.functions.keys()
    functions = {peer: operation.functions[peer] for peer in peers}
    functions["compile"] = torch.compile(functions["eager"], dynamic=False, fullgraph=True, backend="eager")
    for peer, function in functions.items():
        if (name, peer) != ("linear_cross_entropy", "torch"):  # newer than some PyTorch
            error = kernels_bench.largest_error(operation, function, TINY[name], options, exact)
            assert error < most, f"{name} by {peer}: outputs or gradients are {error:.1e} from float64"


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rope", "swiglu", "geglu"])
def test_bytes_are_those_of_the_tensors_that_each_pass_reads_and_writes(name):
    """Forward reads the inputs and writes the outputs; backward reads what is saved and dy and writes the gradients."""
    options = {"device": "cpu", "dtype": torch.bfloat16}
    problem = kernels_bench.Problem(OPERATIONS[name], OPERATIONS[name].functions["eager"], TINY[name], options)
    outputs = sum(y.nbytes for y in problem.forward())
    inputs = sum(x.nbytes for x in problem.tensors if x.ndim > 1)  # weights are negligible
    saved = {"rope": 0, "add_rms_norm": inputs // 2}.get(name, inputs)  # a rotation saves nothing, the norm their sum
    gradients = inputs // 2 if name == "add_rms_norm" else inputs  # one tensor serves x and the residual
    work = OPERATIONS[name].work(TINY[name])
    assert work["forward"] == {"bytes": inputs + outputs}
    assert work["backward"] == {"bytes": saved + outputs + gradients}


MOVED = {  # how often the first inputs are read or written
    ("cross_entropy", "inference"): (1,), ("cross_entropy", "both"): (2,),  # its gradient is as large
    ("adamw", "forward"): (2, 1, 2, 2, 2), ("adamw8bit", "forward"): (2, 1, 2, 2, 2),  # the gradient is only read
    ("nf4", "forward"): (1 + 4, 1),  # a code is half a byte of two
    ("fp8_weight", "forward"): (4,),  # bfloat16 read twice; float8 written twice, read and written transposed
}  # fmt: skip


@pytest.mark.parametrize("name, measured", MOVED)
def test_bytes_are_those_of_what_is_moved(name, measured):
    tensors, constants = OPERATIONS[name].inputs(TINY[name], {"device": DEVICE, "dtype": torch.bfloat16})
    moved = sum(n * x.nbytes for n, x in zip(MOVED[name, measured], (*tensors, *constants), strict=False))
    assert OPERATIONS[name].work(TINY[name])[measured] == {"bytes": moved}


@pytest.mark.parametrize("name, measured, share", [
    ("linear_cross_entropy", "both", 1), ("fp8_linear", "both", 1),
    ("flash_attention", "forward", 20 / 38),  # of 19 x 19 pairs of positions those that are not masked
    ("flash_attention", "backward", 20 / 38 * 5 / 6),  # eager's 2 + 4; a fused backward computes the scores again
])  # fmt: skip
def test_flops_are_those_of_the_matmuls_that_run(name, measured, share):
    problem = kernels_bench.Problem(OPERATIONS[name], OPERATIONS[name].functions["eager"], TINY[name], FP32)
    with FlopCounterMode(display=False) as counter:
        problem.call(measured)()
    assert OPERATIONS[name].work(TINY[name])[measured]["flops"] == round(share * counter.get_total_flops())


def test_the_kernels_are_measured_and_a_failing_function_is_recorded(monkeypatch, tmp_path):
    """All of the command but the clock, on a CPU."""

    def out_of_memory(*inputs):
        raise RuntimeError("CUDA out of memory.")

    head = {"command": "python bench.py kernels", "device": "CPU", "copy_tb_s": 4.0,
            "versions": {"nanocria": "abc", "torch": "2"}}  # fmt: skip
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(runner, "start", lambda *_, **options: records.Record(out, head))
    monkeypatch.setattr(timing, "gpu_time", lambda calls: calls[0]() and {"us": [1.0, 2.0, 3.0], "graph": True})
    monkeypatch.setattr(timing, "use_side_stream", lambda: None)
    for name in ("host_us", "peak_mib", "sets_to_miss_l2"):
        monkeypatch.setattr(timing, name, lambda argument: 2)
    monkeypatch.setattr(kernels_bench, "BF16_CUDA", FP32)
    monkeypatch.setitem(OPERATIONS, "rope", replace(OPERATIONS["rope"], sizes=[TINY["rope"]]))
    monkeypatch.setattr(torch, "compile", lambda eager, **_: out_of_memory)
    with kernels_bench.functorch_config.patch("donated_buffer", True):  # restores what the benchmark changes
        kernels_bench.main(["--op=rope"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["functions"]["compile"] == {"failed": "RuntimeError: CUDA out of memory."}
        assert row["functions"]["nanocria"]["us"] == [1.0, 2.0, 3.0] and row["functions"]["nanocria"]["error"] < 1e-6
