"""The numbers of both pages are those of the records, the records say where they come from, and the kernels' bench
counts and compares what it says it does.

    pytest test_bench.py        seconds, without a GPU: nothing is timed
"""

import json
import re
from pathlib import Path

import pytest
import torch

import bench
from benchmarks import kernels as kernels_bench
from benchmarks import arms, compare, libraries, losses, record, report, runner, timing
from benchmarks.operations import OPERATIONS, Arm

PAGES = {page: (record.ROOT / page).read_text() for page in report.PAGES}
PAGE = "benchmarks/README.md"
RECORDS = sorted(record.RECORDS.glob("*.json"))
FP32 = {"device": "cpu", "dtype": torch.float32}
TINY = {  # a size of each operation that the interpreter runs in a moment; widths that no block divides
    "rms_norm": (5, 19),
    "add_rms_norm": (5, 19),
    "layer_norm": (5, 19),
    "rope": (2, 3, 4, 2, 8),
    "swiglu": (5, 19),
    "geglu": (5, 19),
    "cross_entropy": (5, 19),
    "linear_cross_entropy": (5, 8, 19),
    "fp8_linear": (5, 16, 32),
    "flash_attention": (2, 19, 4, 2, 16),
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf


# ---------------------------------------------------------------------------------------------------------------------
# Pages and records


@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_what_the_records_say(page):
    assert report.render(PAGES[page], page) == PAGES[page], "run python bench.py readme"


def test_the_pages_show_all_plots_that_are_there():
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


def test_the_readme_counts_the_kernels_that_no_peer_beats():
    rows = record.load("kernels")["rows"]
    ours = sum((compare.lead(row) or 0) >= 0.995 for row in rows)
    assert f"In {ours} of {len(rows)} cases they are" in PAGES["README.md"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_device_versions_and_commit(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith("python ") and record["device"]
    assert {"nanocria", "python", "torch"} <= set(record["versions"])
    assert record["versions"]["nanocria"] != "unknown" and not record["versions"]["nanocria"].endswith("-dirty")


def test_a_missing_marker_is_named():
    with pytest.raises(ValueError, match="README.md must hold <!-- fits_headline -->"):
        report.render("<!-- headline --><!-- /headline -->", "README.md")
    with pytest.raises(ValueError, match="README.md shows <!-- sweep -->, which is no part of it"):
        report.render("<!-- sweep --><!-- /sweep -->", "README.md")


def test_a_part_is_asked_for_once_its_record_exists_and_refused_before(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    assert all(report.render("no record, no part", page) == "no record, no part" for page in PAGES)
    with pytest.raises(ValueError, match="<!-- kernels -->.*benchmarks/records/kernels.json"):
        report.render("<!-- kernels --><!-- /kernels -->", PAGE)
    (tmp_path / "kernels.json").write_text(json.dumps(kernels_record()))
    with pytest.raises(ValueError, match="must hold <!-- kernels -->"):
        report.render("no record, no part", PAGE)
    assert "rms_norm" in report.render("<!-- kernels --><!-- /kernels -->", PAGE)


@pytest.mark.parametrize("name", ["x/y", "../zz", "", "..", "-x"])
def test_a_record_is_kept_by_a_name_alone(tmp_path, name):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SystemExit, match=re.escape(f"the record's name is {name!r}: letters, digits, _ and -")):
        record.keep_summary(str(tmp_path), name)


def test_the_headline_leaves_out_what_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    place = {"batch": 8, "block": 2048, "checkpointing": "none"}
    ours = place | {"arm": "nanocria", "tok_per_s": 9000.0, "peak_gib": 30.0, "mfu": None}
    step = {"device": "GPU", "points": [ours]}
    (tmp_path / "step.json").write_text(json.dumps(step))
    assert report.headline() == "- Llama 3.2 1B trains at 9,000 tokens per second on one GPU, in 30 GiB."
    step["points"] = [ours | {"mfu": 0.5}, ours | {"arm": "recipe", "tok_per_s": 6000.0, "peak_gib": 40.0}]
    (tmp_path / "step.json").write_text(json.dumps(step))
    assert report.headline().endswith(
        "second (50% MFU) on one GPU: 1.50 times the speed of torchtitan's recipe, in 75% of its memory (30 GiB)."
    )


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "baby_llama_cpu",
            None,
            "benchmarks/README.md shows <!-- baby -->, but there is no benchmarks/records/baby_llama_cpu.json",
        ),
        ("baby_llama_cpu", "{", "baby_llama_cpu.json is not JSON: "),
        (
            "step",
            '{"points": []}',
            "shows <!-- headline -->, but there is no row of points in benchmarks/records/step.json",
        ),
        (
            "gpus",
            '{"scaling": []}',
            "shows <!-- gpus -->, but there is no row of scaling in benchmarks/records/gpus.json",
        ),
    ],
)
def test_a_missing_or_broken_record_is_named(name, content, sentence, tmp_path, monkeypatch):
    pytest.importorskip("benchmarks.draw", exc_type=ImportError)
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    for path in record.ROOT.glob("benchmarks/records/*.json"):
        (tmp_path / path.name).write_text(path.read_text() if path.stem != name else content or "")
    if content is None:
        (tmp_path / f"{name}.json").unlink()
    with pytest.raises(SystemExit, match=sentence):
        bench.main(["readme"])


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["estimat"], "Unknown word estimat. Did you mean estimate?"),
        (["card=24", "estimate"], "Unknown word estimate: it comes first, python bench.py estimate"),
        (["sweep=both", "--mlp_chunks", "8"], "Unknown word --mlp_chunks: say --mlp_chunks=..."),
    ],
)
def test_to_words_that_it_does_not_know_it_explains_itself(words, end):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert "python bench.py readme" in stop.value.code and stop.value.code.endswith(end)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["record", "--help"], ["sweep=both", "-h"]])
def test_help_is_printed_and_is_no_failure(words, capsys):
    bench.main(words)
    assert capsys.readouterr().out == bench.__doc__.lstrip()


@pytest.mark.parametrize("command", bench.MODULES)
def test_each_command_has_help_of_its_own(command, capsys):
    for words in (["--help"], ["out=here.json", "-h"]):
        bench.main([command, *words])
        assert f"\n    python bench.py {command} " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["record"], ["record", "out"], ["readme", "now"]])
def test_a_command_with_too_few_or_too_many_words_shows_how_it_is_used(words):
    with pytest.raises(SystemExit, match="usage: python bench.py record FOLDER NAME"):
        bench.main(words)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels' table


def kernels_record():
    """Two passes of one norm, the first faster than all peers, the second beaten by one, and a peer that failed."""

    def arm(us):
        return {"us": [us - 1, us, us + 1], "graph": True, "host_us": 9.0, "peak_mib": us, "error": 1e-3}

    row = {"op": "rms_norm", "shape": {"N": 16384, "C": 2048}, "bytes": 120_000_000, "floor_us": 30.0}
    failed = {"failed": "OutOfMemoryError: CUDA out of memory."}
    versions = {"nanocria": "abc1234", "python": "3.12.3", "torch": "2.11.0"}
    return {
        "command": "python bench.py kernels",
        "device": "1 x NVIDIA H200",
        "versions": versions,
        "copy_tb_s": 4.0,
        "matmul_tflops": 700.0,
        "rows": [
            row | {"pass": "forward", "arms": {"nanocria": arm(40.0), "eager": arm(60.0), "liger": failed}},
            row | {"pass": "backward", "arms": {"nanocria": arm(50.0), "eager": arm(2500.0), "liger": arm(40.0)}},
        ],
    }


def test_the_table_shows_time_share_and_where_a_peer_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    (tmp_path / "kernels.json").write_text(json.dumps(kernels_record()))
    times = "| forward / backward | 40.0 us / 50.0 us | 75% / 60% | 1.50 x eager / **0.80 x liger** |"
    assert f"| `rms_norm` | N16384 C2048 {times}" in report.kernels_table("kernels")
    assert report.kernels_table("kernels").endswith(
        "Measured on one NVIDIA H200 with PyTorch 2.11.0; copies 4.00 TB/s, matmuls 700 TFLOP/s. "
        "Command: `python bench.py kernels`; commit: [benchmarks/records/kernels.json](benchmarks/records/kernels.json)."
    )


def test_the_commands_of_a_record_that_was_continued_are_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    (tmp_path / "step.json").write_text(json.dumps(kernels_record() | {"command": "python a && python b"}))
    assert report.footer("step").endswith(
        " Commands and commits: [benchmarks/records/step.json](benchmarks/records/step.json)."
    )


def test_a_printed_line_stands_under_its_header_and_dashes_what_failed():
    arms = ["nanocria", "eager", "compile", "liger"]
    header, line = kernels_bench.table_header(arms), kernels_bench.table_line(kernels_record()["rows"][0], arms)
    assert len(header) == len(line) and line.split()[-7:] == ["40.0", "us", "60.0", "us", "-", "-", "75%"]


def test_the_summary_names_slower_rows_and_failures(tmp_path):
    summary = kernels_bench.summary(kernels_record(), tmp_path, 1.0)
    assert summary["slower"] == ["rms_norm N16384 C2048 backward"]
    assert summary["inaccurate"] == []
    assert list(summary["failed"]) == ["rms_norm N16384 C2048 forward liger"]


def test_the_summary_names_an_error_that_eager_does_not_have(tmp_path):
    wrong = kernels_record()
    wrong["rows"][0]["arms"]["nanocria"]["error"] = 6e-3
    assert kernels_bench.summary(wrong, tmp_path, 1.0)["inaccurate"] == ["rms_norm N16384 C2048 forward"]


def test_the_record_keeps_five_digits():
    assert kernels_bench.rounded({"us": [1.23456789, 2], "graph": True}) == {"us": [1.2346, 2], "graph": True}


def test_the_plots_are_drawn_from_a_record(tmp_path):
    draw = pytest.importorskip("benchmarks.draw", exc_type=ImportError)
    draw.draw_kernels_speed(kernels_record(), tmp_path / "speed.png")
    draw.draw_kernels_memory(kernels_record(), tmp_path / "memory.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("speed.png", "memory.png"))


# ---------------------------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["op=rmsnorm"], "flash_attention. Did you mean rms_norm?"),
        (["op=rope,attenton"], "op=attenton: there are rms_norm, "),
        (["ops=rope"], "Unknown word ops=rope: there are op=, out=. Did you mean op=?"),
        (["rope"], "Unknown word rope: there are op=, out="),
        (["out="], "out= is empty"),
    ],
)
def test_a_slip_in_the_words_is_named(words, sentence):
    with pytest.raises(SystemExit) as stop:
        bench.main(["kernels", *words])
    assert sentence in str(stop.value) and "mean out?" not in str(stop.value)


def test_only_a_whole_run_replaces_the_record_of_the_readme():
    assert kernels_bench.parse([]) == (list(OPERATIONS), record.ROOT / "benchmarks/records/kernels.json")
    assert kernels_bench.parse(["op=rope,geglu"]) == (["rope", "geglu"], record.ROOT / "out/kernels.json")
    assert kernels_bench.parse(["op=rope", "out=here.json"]) == (["rope"], Path("here.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would run")
def test_without_a_gpu_it_says_what_to_run_instead():
    with pytest.raises(SystemExit, match="CUDA GPU.*pytest test_kernels.py"):
        bench.main(["kernels"])


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_arms_compute_one_function(name):
    operation, size = OPERATIONS[name], TINY[name]
    options, most = (FP32 | {"dtype": torch.bfloat16}, 0.1) if name == "fp8_linear" else (FP32, 1e-6)
    truth = kernels_bench.true_results(operation, size, options)
    for arm in ("nanocria", "eager", "torch"):
        if arm in operation.arms:
            error = kernels_bench.largest_error(operation, operation.arms[arm], size, options, truth)
            assert error < most, f"{name} by {arm}: outputs or gradients are {error:.1e} from float64"


def test_an_arm_that_computes_another_function_has_an_error_that_says_so():
    operation, size = OPERATIONS["swiglu"], TINY["swiglu"]
    truth = kernels_bench.true_results(operation, size, FP32)
    assert kernels_bench.largest_error(operation, OPERATIONS["geglu"].arms["eager"], size, FP32, truth) > 1e-2
    with pytest.raises(ValueError, match="not finite"):
        kernels_bench.largest_error(operation, Arm(lambda x: x[:, ::2] * torch.nan), size, FP32, truth)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "geglu"])
def test_bytes_are_those_of_the_tensors_that_each_pass_reads_and_writes(name):
    """Forward reads the inputs and writes the outputs; backward reads what is saved and dy and writes the gradients."""
    size, options = TINY[name], {"device": "cpu", "dtype": torch.bfloat16}
    problem = kernels_bench.Problem(OPERATIONS[name], OPERATIONS[name].arms["eager"], size, options)
    outputs = problem.forward()
    inputs = bytes_of(x for x in problem.tensors if x.ndim > 1)  # weights are small change
    saved = {"rope": 0, "add_rms_norm": inputs // 2}.get(name, inputs)  # a rotation saves nothing, the norm their sum
    gradients = inputs // 2 if name == "add_rms_norm" else inputs  # one tensor serves x and the residual
    work = OPERATIONS[name].work(size)
    assert work["forward"] == {"bytes": inputs + bytes_of(outputs)}
    assert work["backward"] == {"bytes": saved + bytes_of(outputs) + gradients}


def bytes_of(tensors):
    return sum(x.nbytes for x in tensors)


def test_cross_entropy_reads_logits_once_and_writes_their_gradient():
    logits = torch.empty(TINY["cross_entropy"], dtype=torch.bfloat16).nbytes
    work = OPERATIONS["cross_entropy"].work(TINY["cross_entropy"])
    assert {name: bytes_and["bytes"] for name, bytes_and in work.items()} == {
        "inference": logits, "both": 2 * logits
    }  # fmt: skip


def test_an_arm_that_fails_is_recorded_and_the_others_go_on(monkeypatch):
    def out_of_memory(*inputs):
        raise RuntimeError("CUDA out of memory.\nTried to allocate much.")

    monkeypatch.setattr(timing, "gpu_time", lambda calls: {"us": [1.0, 2.0, 3.0], "graph": True})
    for name in ("host_us", "peak_mib", "sets_to_miss_l2"):
        monkeypatch.setattr(timing, name, lambda argument: 2)
    monkeypatch.setattr(kernels_bench, "BF16_CUDA", FP32)
    monkeypatch.setattr(kernels_bench, "compiled", lambda eager: Arm(out_of_memory))
    rows = kernels_bench.measure_size(
        "rope", OPERATIONS["rope"], TINY["rope"], {"copy_tb_s": 4.0, "matmul_tflops": 700.0}
    )
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


def test_a_size_that_does_not_fit_takes_no_other_with_it(monkeypatch, tmp_path, capsys):
    def measure_size(name, operation, size, limits):
        if size == operation.sizes[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        written.append(out.exists() and len(json.loads(out.read_text())["rows"]))
        return [row | {"op": name, "shape": operation.shape(size)} for row in kernels_record()["rows"]]

    out, written, sizes = tmp_path / "kernels.json", [], OPERATIONS["rms_norm"].sizes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(timing, "use_side_stream", lambda: None)
    monkeypatch.setattr(timing, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(timing, "matmul_tflops", lambda: 700.0)
    monkeypatch.setattr(record, "origin", lambda command, device, packages: {"command": command, "device": device})
    monkeypatch.setattr(kernels_bench, "measure_size", measure_size)
    with kernels_bench.functorch_config.patch("donated_buffer", True):  # and back again, for it changes that
        kernels_bench.main(["op=rms_norm", f"out={out}"])
    assert written == [False, *range(2, 2 * len(sizes) - 2, 2)], "the record is written after each size"
    assert len(json.loads(out.read_text())["rows"]) == 2 * len(sizes) - 2
    printed = capsys.readouterr().out
    assert f"rms_norm N{sizes[-1][0]} C{sizes[-1][1]}: out of memory" in printed and printed.count("of limit") == 1
    with pytest.raises(SystemExit, match="is no file"):
        kernels_bench.main([f"out={tmp_path}"])


@pytest.mark.parametrize(("free_gib", "elements"), [(139, 2**30), (4, 2**28)])
def test_a_copy_takes_at_most_half_of_what_is_free(free_gib, elements, monkeypatch):
    asked = []

    def randn(n, device):
        asked.append(n)
        return torch.ones(4)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * 2**30, 0))
    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(timing, "events_ms", lambda calls, rounds: [1.0])
    timing.copy_tb_s()
    assert asked == [elements]


def test_a_size_has_a_letter_for_each_number_and_inputs_that_other_seeds_change():
    for name, operation in OPERATIONS.items():
        assert all(len(size) == len(operation.dims.split()) for size in [*operation.sizes, TINY[name]])
        first, same, other = (
            kernels_bench.Problem(operation, operation.arms["nanocria"], TINY[name], FP32, seed).tensors[0]
            for seed in (0, 0, 1)
        )
        assert torch.equal(first, same) and not torch.equal(first, other)


def test_quantiles():
    assert timing.quantiles([5.0, 1.0, 4.0, 2.0, 3.0, 0.0]) == [1.0, 2.5, 4.0]
    assert timing.quantiles([7.0]) == [7.0, 7.0, 7.0]


# ---------------------------------------------------------------------------------------------------------------------
# Losses

LOSSES = {
    "command": "python bench.py losses",
    "device": "GPU",
    "versions": {"nanocria": "abc1234", "torch": "2.11.0", "transformers": "5.17.0", "torchtitan": "0.2.0"},
    "runs": [
        {"arm": arm, "steps": 6, "batch": 8, "block": 1024, "losses": values}
        for arm, values in {
            "nanocria": [3.0, 2.5, 2.0, 1.5, 1.25, 1.0],
            "hf": [3.0, 2.5, 2.0, 1.5, 1.0, 1.5],
            "float32": [3.0, 2.5, 2.0, 1.5, 1.0, 1.0],
        }.items()
    ],
}


def test_train_py_is_hugging_faces_model_under_pytorchs_adamw():
    """Step for step: the same first weights, tokens, losses, gradients' clip, learning rates and updates."""
    pytest.importorskip("transformers")
    at, config = (8, 2, 64), "config/baby_llama.py"
    ours = losses.train_losses("nanocria", *at, config, ["--n_layer=2", "--device=cpu", "--dtype=float32"])
    theirs = losses.peer_losses("float32", *at, config, compute_dtype="float32", n_layer=2, vocab_size=257)
    found = [our - their for our, their in zip(ours["losses"], theirs["losses"], strict=True)]
    assert len(found) == 8 and max(map(abs, found)) < 1e-5, f"they differ by {found}"


def test_losses_are_compared_with_those_of_float32():
    rows = LOSSES["runs"]
    assert [compare.loss_cells(row, rows) for row in rows] == [
        ["1.1250", "+0.1250", "0.1250"], ["1.2500", "+0.2500", "0.2500"], ["1.0000", "-", "-"],
    ]  # fmt: skip
    assert compare.loss_cells(rows[0], rows[:2]) == ["1.1250", "-", "-"]  # float32 was not measured
    assert "Hugging Face, bfloat16" in losses.line(rows[1], LOSSES)
    assert "out of memory" in losses.line({"arm": "hf", "oom": True}, LOSSES)


def test_losses_are_drawn_and_shown(tmp_path, monkeypatch):
    draw = pytest.importorskip("benchmarks.draw", exc_type=ImportError)
    draw.draw_losses(LOSSES, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    (tmp_path / "losses.json").write_text(json.dumps(LOSSES))
    assert "6 steps of 8 x 1,024 tokens" in report.losses_part() and "| nanocria | 1.1250 |" in report.losses_part()
    assert "Measured on one GPU with PyTorch 2.11.0, transformers 5.17.0. Command" in report.losses_part()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["arms=nanocra"], f"arms=nanocra: there are {', '.join(arms.LOSSES)}. Did you mean nanocria?"),
        (["shape=8"], "sequences x tokens, as in 8x2048"),
        (["steps=0"], "steps=0: a whole number, at least 1"),
        (["steps=100000"], "steps=100000: with 8 x 1024 tokens, pystdlib has enough for "),
    ],
)
def test_a_slip_with_losses_gets_a_sentence(words, sentence):
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        losses.main(words)
