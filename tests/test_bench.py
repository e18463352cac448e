"""The numbers on both pages match the records, the records state their origin, and the kernels' benchmark counts and
compares what it claims to. Without a GPU: nothing is timed."""

import importlib
import json
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import bench
from benchmarks import compare, draw, libraries, losses, record, report, runner, timing
from benchmarks import kernels as kernels_bench
from benchmarks.operations import OPERATIONS
from configurator import SettingError
from test_kernels import DEVICE

PAGES = {page: (record.ROOT / page).read_text() for page in report.PAGES}
RECORDS = sorted(record.RECORDS.glob("*.json"))
FP32 = {"device": "cpu", "dtype": torch.float32}
# For each operation a size that the interpreter runs quickly; no block divides the widths.
TINY = dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy"), (5, 19))
TINY |= {"rope": (2, 3, 4, 2, 8), "linear_cross_entropy": (5, 8, 19), "fp8_linear": (5, 16, 32), "fp8_weight": (5, 19)}
TINY |= {"flash_attention": (2, 19, 4, 2, 16), "adamw": (300,), "adamw8bit": (300,), "nf4": (5, 128)}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf


# --- Pages and records ---


@pytest.mark.parametrize("page", PAGES)
def test_pages_match_the_records(page):
    assert report.render(PAGES[page], page) == PAGES[page], "run python bench.py readme"


def test_every_plot_is_on_a_page():
    shown = {
        (record.ROOT / page).parent.joinpath(plot).resolve()
        for page, text in PAGES.items()
        for plot in re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE)
    }
    assert shown == set(report.PLOTS.glob("*.png")) and report.PLOTS / "baby_llama.png" in shown
    assert all(plot.stat().st_size > 10_000 for plot in shown)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        path = (record.ROOT / page).parent / target if target else record.ROOT / page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, f"{target}#{anchor}"


def test_the_page_counts_the_kernels_that_no_peer_beats():
    rows = record.load("kernels")["rows"]
    ours = sum(compare.lead(row)[0] >= 0.995 for row in rows)
    assert f"For {ours} of the {len(rows)} times in the first table no peer" in PAGES["benchmarks/README.md"]


def test_a_kernel_file_says_how_near_its_record_is_to_the_limit():
    files, found = {"add_rms_norm": "rms_norm", "swiglu": "glu", "geglu": "glu", "fp8_weight": "fp8_linear"}, {}
    for row in [row for name in ("kernels", "fp8_linear", "adamw_nf4") for row in record.load(name)["rows"]]:
        found.setdefault((row["op"], row["pass"]), []).append(round(100 * compare.of_limit(row)))
    for (op, name), shares in found.items():
        text = " ".join((record.ROOT / "kernels" / f"{files.get(op, op)}.py").read_text().split())
        (said,) = re.findall(r"On one H200, where .+? 100%: (.+?)\.", text)
        of_op = next(part for part in said.split("; ") if part.startswith(op) or "; " not in said)
        name = {"inference": "the loss alone", "both": "forward and backward"}.get(name, name)
        low, high = f"{min(shares)}-" * (min(shares) < max(shares)), max(shares)
        assert f"{name} {low}{high}%" in of_op.replace("with the gradient", "forward and backward"), (op, of_op)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_device_versions_and_commit(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith(("python ", "torchrun ")) and record["device"]
    assert {"nanocria", "python", "torch"} <= set(record["versions"])
    assert record["versions"]["nanocria"] != "unknown" and not record["versions"]["nanocria"].endswith("-dirty")


def test_every_plot_is_drawn_from_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "PLOTS", tmp_path)
    monkeypatch.setattr(report, "render", lambda text, page: text)
    report.write_pages()
    drawn = {path.stem for path in tmp_path.iterdir() if path.stat().st_size > 10_000}
    assert drawn == {"baby_llama", "linux_114m", *draw.PLOTS}


def test_a_missing_marker_is_named():
    with pytest.raises(SettingError, match="README.md must hold each part .*'headline'"):
        report.render("no part", "README.md")
    with pytest.raises(SettingError, match="'sweep'"):
        report.render("<!-- sweep -->\n<!-- /sweep -->", "README.md")


def test_imports_within_benchmarks_have_no_circle():
    imports = {}
    for path in (record.ROOT / "benchmarks").glob("[a-z]*.py"):
        text = path.read_text()
        imports[path.stem] = set(re.findall(r"^ *from benchmarks\.(\w+)", text, re.MULTILINE))
        for names in re.findall(r"^ *from benchmarks import (.+)$", text, re.MULTILINE):
            imports[path.stem] |= {name.split()[0] for name in names.split(", ")}
    TopologicalSorter(imports).prepare()


USER_ERRORS = """
xyz => Unknown command xyz: there are sweep, estimate,
readme now => usage: python bench.py record FOLDER NAME
kernels --op=rmsnorm => --op=rmsnorm: there are rms_norm,
kernels -- --compile => -- --compile: this command passes nothing on to train.py
losses --shape=8 => --shape=8: sequences x tokens, as in 8x2048
losses --shape= => --shape=: sequences x tokens, as in 8x2048
finetune => --init_from=: name a folder of published weights
finetune --init_from=config --dataset=/no/such => --dataset=/no/such: /no/such
gpus --ranks=two => --ranks=two: whole numbers, at least 1
snapshot -- --offload=all => -- --offload: say --offload=... before the --
estimate --card=4080 => 4080: there are 3090, 4090, 5090, a10g, l4, l40s, a100-40, a100-80, h100, h200, b200, or
estimate --card=24MB => --card=24MB: there are
estimate --config=llama32_1 => llama32_1 does not exist. Did you mean
estimate config/llama31_8b.py => Unknown word config/llama31_8b.py: say --config=config/llama31_8b.py
estimate llama31_8b => Unknown word llama31_8b: settings are --key=value
estimate --config=config/baby_llama.py => leaves vocab_size to its dataset: add -- --vocab_size=
generate --config=config/baby_llama.py => leaves vocab_size to its dataset
estimate --compile => --compile is a setting of train.py: put it after --, as in -- --compile=...
estimate -- --activation_checkpointing=full => say --checkpointing=... before the --
estimate --checkpointing=none -- --mlp_chunks=4 => mlp_chunks
estimate --card=h100 --config=config/llama31_8b.py --ranks=7 => 64: make it a multiple of the 7 ranks, as in --grad
estimate --offload=all -- --cuda_graph=true => cuda_graph needs one GPU and offload=none: add --cuda_graph=false
estimate --card=A100-80 -- --fp8=true => fp8 needs RTX 40, L4, H100 or newer, not --card=A100-80
estimate -- --fp8=true --ffn_dim=8200 => fp8 needs projections whose sides are multiples of 16, not 2048 x 8200
estimate -- --fp8=true --lora_rank=16 --ffn_dim=8200 => fp8 needs projections whose sides are multiples of 16
estimate -- --base_dtype=nf4 --lora_rank=16 --n_embd=2060 --n_head=10 --n_kv_head=5 => whole blocks of 64 weights
ladder --rungs=nvme => --rungs=nvme needs a folder on an NVMe drive
run => usage: python bench.py run FOLDER
run /no/such => /no/such/metrics.jsonl has no losses: name the out_dir of a run of train.py
--arms=al => --arms=al: there are all, long, kernels, torch, lora, lora-fp8, qlora, qlora-fp8, none
--memory_limit_gib=0 => --memory_limit_gib=0.0: it must be above 0
--peers=hf -- --n_layer=4 => --n_layer: the peers would train another model; write it in a config, or say
--peers=hf -- --rope_theta=1e4 => --rope_theta: the peers would train another model
--ranks=64 => --ranks=64: torch sees
-- --max_iters=4 => -- --max_iters: each measured run sets its own, leave it out
"""
ON_GPU_ALONE = """
kernels => python bench.py kernels needs a CUDA GPU
--sweep=both => python bench.py sweep needs a CUDA GPU, and torch finds none: python bench.py estimate,
"""


@pytest.mark.parametrize(
    "case", [*filter(None, (USER_ERRORS + ON_GPU_ALONE * (not torch.cuda.is_available())).splitlines())]
)
def test_a_user_error_gets_a_sentence_and_a_suggestion(case):
    words, _, sentence = case.partition("=> ")
    with pytest.raises(SystemExit) as stop:
        bench.main(words.split())
    assert sentence in str(stop.value.code)


def test_help_exits_with_status_0(capsys):
    bench.main(["--help"])
    assert capsys.readouterr().out == bench.__doc__.lstrip()


@pytest.mark.parametrize("command", bench.MODULES)
def test_each_command_has_help_made_from_the_comments_of_its_settings(command, capsys):
    module = importlib.import_module(f"benchmarks.{command}")
    for words in (["--help"], ["--out=here.json", "-h"] if command != "estimate" else ["-h"]):
        with pytest.raises(SystemExit) as stop:
            bench.main([command, *words])
        printed = capsys.readouterr().out
        assert not stop.value.code and printed.startswith(module.__doc__.strip())
        assert f"\n    python bench.py {command} " in printed or command == "sweep"
        assert re.search(r"^  --\w+ +\w+.* {2}\w", printed, re.MULTILINE), "a name, a type, a value, a comment"


# --- The kernels' table ---


KERNEL = {
    "op": "rms_norm", "shape": {"N": 16384, "C": 2048}, "pass": "forward", "bytes": 120_000_000, "floor_us": 30.0,
    "arms": {"nanocria": {"us": [39.0, 40.0, 41.0], "error": 1e-3}, "eager": {"us": [59.0, 60.0, 61.0], "error": 1e-3},
             "liger": {"failed": "OutOfMemoryError: CUDA out of memory."}},
}  # fmt: skip


def test_a_line_has_the_times_and_names_an_error_that_eager_does_not_have():
    line = "rms_norm N16384 C2048 forward 75% nanocria 40.0 us, eager 60.0 us"
    assert runner.line({}, KERNEL).split() == line.split()
    wrong = KERNEL["arms"] | {"nanocria": KERNEL["arms"]["nanocria"] | {"error": 6e-3}}
    assert runner.line({}, KERNEL | {"arms": wrong}).split() == [*line.split(), "INACCURATE"]


def test_only_a_whole_run_replaces_the_record_of_the_readme():
    def parsed(*argv):
        s = kernels_bench.parse(list(argv))
        return s.op, s.out

    assert parsed() == (list(OPERATIONS), record.ROOT / "benchmarks/records/kernels.json")
    assert parsed("--op=rope,geglu") == (["rope", "geglu"], record.ROOT / "out/kernels.json")
    assert parsed("--op=rope", "--out=here.json") == parsed("--op=rope", "--out", "here.json")
    s = kernels_bench.parse(["--out", "here.json", "--op=rope"])
    assert (s.out, s.command) == (Path("here.json"), ["--op=rope"]), "the record does not say where it was"


# --- What is compared ---


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_arms_compute_one_function(name):
    operation, size = OPERATIONS[name], TINY[name]
    options, most = (FP32 | {"dtype": torch.bfloat16}, 0.1) if name.startswith("fp8") else (FP32, 1e-6)
    most = 4e-3 if name == "nf4" else most  # its result is bfloat16, which the interpreter truncates
    if name == "fp8_weight":  # its functions have no references
        options = options | {"device": DEVICE}
    truth = kernels_bench.true_results(operation, size, options)
    for arm in ("nanocria", "eager", "torch", "bitsandbytes"):
        if arm in operation.arms:
            error = kernels_bench.largest_error(operation, operation.arms[arm], size, options, truth)
            assert error < most, f"{name} by {arm}: outputs or gradients are {error:.1e} from float64"


def test_an_arm_that_computes_another_function_has_an_error_that_says_so():
    operation, size = OPERATIONS["swiglu"], TINY["swiglu"]
    truth = kernels_bench.true_results(operation, size, FP32)
    assert kernels_bench.largest_error(operation, OPERATIONS["geglu"].arms["eager"], size, FP32, truth) > 1e-2
    with pytest.raises(ValueError, match="not finite"):
        kernels_bench.largest_error(operation, lambda gate, up: gate * up * torch.nan, size, FP32, truth)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "geglu"])
def test_bytes_are_those_of_the_tensors_that_each_pass_reads_and_writes(name):
    """Forward reads the inputs and writes the outputs; backward reads what is saved and dy and writes the gradients."""
    size, options = TINY[name], {"device": "cpu", "dtype": torch.bfloat16}
    problem = kernels_bench.Problem(OPERATIONS[name], OPERATIONS[name].arms["eager"], size, options)
    outputs = problem.forward()
    inputs = bytes_of(x for x in problem.tensors if x.ndim > 1)  # weights are negligible
    saved = {"rope": 0, "add_rms_norm": inputs // 2}.get(name, inputs)  # a rotation saves nothing, the norm their sum
    gradients = inputs // 2 if name == "add_rms_norm" else inputs  # one tensor serves x and the residual
    work = OPERATIONS[name].work(size)
    assert work["forward"] == {"bytes": inputs + bytes_of(outputs)}
    assert work["backward"] == {"bytes": saved + bytes_of(outputs) + gradients}


def test_bytes_of_the_loss_are_those_of_its_logits_and_where_it_learns_of_their_gradient():
    logits = torch.empty(TINY["cross_entropy"], dtype=torch.bfloat16).nbytes
    work = OPERATIONS["cross_entropy"].work(TINY["cross_entropy"])
    assert work == {"inference": {"bytes": logits}, "both": {"bytes": 2 * logits}}


def bytes_of(tensors):
    return sum(x.nbytes for x in tensors)


def test_a_failing_arm_is_recorded_and_the_others_still_run(monkeypatch):
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
        assert row["arms"]["compile"] == {"failed": "RuntimeError: CUDA out of memory."}
        assert row["arms"]["nanocria"]["us"] == [1.0, 2.0, 3.0] and row["arms"]["nanocria"]["error"] < 1e-6


def test_a_library_that_cannot_be_imported_has_no_arms(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no driver")

    def missing():
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    monkeypatch.setattr(libraries, "LIBRARIES", (broken, missing, lambda: {"rope": {}}))
    assert libraries.installed() == [{"rope": {}}]
    assert capsys.readouterr().err == "broken is left out, RuntimeError: no driver\n"


def test_one_size_out_of_memory_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    def measure_size(name, operation, size, limits):
        if size == operation.sizes[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        written.append(out.exists() and len(json.loads(out.read_text())["rows"]))
        return [KERNEL | {"shape": operation.shape(size), "pass": name} for name in ("forward", "backward")]

    out, written, sizes = tmp_path / "kernels.json", [], OPERATIONS["rms_norm"].sizes
    monkeypatch.setattr(timing, "use_side_stream", lambda: None)
    head = {"command": "", "device": "GPU", "versions": {"nanocria": "abc"}}
    monkeypatch.setattr(runner, "begin", lambda *_, **options: head | {"rows": []})
    monkeypatch.setattr(kernels_bench, "measure_size", measure_size)
    with kernels_bench.functorch_config.patch("donated_buffer", True):  # restores what the benchmark changes
        kernels_bench.main(["--op=rms_norm", f"--out={out}"])
    assert written == [False, *range(2, 2 * len(sizes) - 2, 2)], "the record is written after each row"
    assert len(json.loads(out.read_text())["rows"]) == 2 * len(sizes) - 2
    printed = capsys.readouterr().out
    assert f"rms_norm {sizes[-1]}: out of memory" in printed


# --- Losses ---


def test_train_py_matches_hugging_faces_model_with_pytorchs_adamw(monkeypatch):
    """Step by step: the same initial weights, tokens, losses, gradient clipping, learning rates and updates."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # else the interpreter would run the whole training
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # for the peer, which takes no --device=cpu
    at, config = (8, 2, 64), "config/baby_llama.py"
    ours = losses.train_losses("nanocria", *at, config, ["--n_layer=2", "--device=cpu", "--dtype=float32"])
    theirs = losses.peer_losses("float32", *at, config, compute_dtype="float32", n_layer=2, vocab_size=257)
    found = [our - their for our, their in zip(ours["losses"], theirs["losses"], strict=True)]
    assert len(found) == 8 and max(map(abs, found)) < 1e-5, f"they differ by {found}"


def test_galore_matches_galore_torch(monkeypatch):
    """It takes the leading singular vectors from an SVD; ours converge to them in some steps of subspace iteration."""
    pytest.importorskip("galore_torch")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    at, config = (8, 2, 64), "config/baby_llama.py"
    flags = ["--n_layer=2", "--device=cpu", "--dtype=float32"]
    ours = losses.train_losses("nanocria-galore", *at, config, [*flags, "--galore_rank=32"])
    theirs = losses.peer_losses("hf-galore", *at, config, compute_dtype="float32", rank=32, n_layer=2, vocab_size=257)
    adamw = losses.train_losses("nanocria", *at, config, flags)
    found = [abs(our - their) for our, their in zip(ours["losses"], theirs["losses"], strict=True)]
    other = [abs(our - their) for our, their in zip(ours["losses"], adamw["losses"], strict=True)]
    assert len(found) == 8 and max(found) < 1e-3 < 1e-2 < max(other), (found, other)


def test_losses_are_compared_only_with_float32():
    found = record.load("losses")
    runs = [row for row in found["runs"] if row["arm"] != "float32"]
    assert report.losses_table({"runs": runs}).count(" | - | - |") == len(runs)
