"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                     all of it, on 1, 2, 4, ... of the GPUs that are there
    python bench.py gpus scaling             Llama 3.2 1B, 16 x 2048 tokens a GPU
    python bench.py gpus 8b                  Llama 3.1 8B, with and without checkpointing
    python bench.py gpus saves               1B, 8 x 2048 tokens a GPU: a checkpoint every 100 steps, then a resume
    python bench.py gpus scaling ranks=1,4 arms=nanocria,recipe steps=20
    python bench.py gpus 8b arms=nanocria-zero2,recipe-zero2 shapes=2x4096 checkpointing=none,full
    python bench.py gpus saves folder=/mnt/disk      where the checkpoints go, 30 GB of them for a while

ranks= are numbers of GPUs: scaling takes each of them, 8b and saves the largest. Arms: nanocria, which is train.py
itself, and recipe and torchtitan of benchmarks/peers.py; -zero2 and -hybrid (two copies of the model) say how they are
sharded where it is not ZeRO-3, -nccl that collectives.py is left out, -each that each GPU has a run of its own, side by
side: what cards can reach that share a machine's power and air. On one GPU nanocria is not sharded at all, and its
peers are on a mesh of one rank. Each point is a torchrun of its own, measured as in benchmarks/step.py and kept as
there, in benchmarks/records/gpus.json or out=...
"""

import functools
import json
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path

import torch

from benchmarks import report, step
from runtime import run_folder

ARMS = {
    "nanocria": "nanocria, ZeRO-3",
    "nanocria-zero2": "nanocria, ZeRO-2",
    "nanocria-hybrid": "nanocria, hybrid",
    "nanocria-nccl": "nanocria, ZeRO-3, NCCL alone",
    "nanocria-each": "nanocria, an independent run on each GPU",
    "recipe": "torchtitan's recipe, ZeRO-3",
    "recipe-zero2": "torchtitan's recipe, ZeRO-2",
    "torchtitan": "torchtitan, ZeRO-3",
}
PACKAGES = ("torchtitan",)
SCALING_CONFIG, SCALING_AT = "config/llama32_1b.py", [(16, 2048, "none")]  # sequences x tokens, checkpointing
SCALING_ARMS = [arm for arm in ARMS if arm != "recipe-zero2"]
BIG_CONFIG, BIG_ARMS = "config/llama31_8b.py", ["nanocria", "recipe"]
BIG_AT = [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full"),
          (4, 4096, "selective"), (2, 8192, "selective")]  # fmt: skip
SAVES_AT = (8, 2048, "none")
SAVE_EVERY, SAVE_STEPS = 100, 300

PLACE = ("arm", "ranks", "batch", "block", "checkpointing")
ROWS = {"scaling": PLACE, "8b": PLACE, "saves": ("ranks",)}  # what names a row
READ = {
    "scaling": ("ranks", "arms", "steps", "out"),
    "8b": ("ranks", "arms", "shapes", "checkpointing", "steps", "out"),
    "saves": ("ranks", "folder", "out"),
}


# ----------------------------------------------------------------------------------------------------------------------
# Words


def parse(words: list[str], n_gpus: int) -> tuple[list[str], dict]:
    """What to measure, and the options; ValueError with a sentence for a slip."""
    options = {key: [] for key in ("ranks", "arms", "shapes", "checkpointing", "steps", "folder", "out")}
    shapes = [f"{batch}x{block}" for batch, block, _ in BIG_AT]
    choices = {"arms": ARMS, "shapes": list(dict.fromkeys(shapes)), "checkpointing": step.CHECKPOINTING}
    said, options = step.read_words(words, options, list(ROWS), choices)
    kinds = [kind for kind in ROWS if kind in said] or list(ROWS)
    step.refuse_unread(words, kinds, READ)
    ranks = sorted({step.whole("ranks", text) for text in options["ranks"]})
    options["ranks"] = [r for r in ranks or (1, 2, 4, 8) if r <= n_gpus]
    for left_out in (r for r in ranks if r > n_gpus):
        print(f"ranks={left_out}: left out, torch sees {n_gpus} GPU{'s' * (n_gpus != 1)}")
    arms = options["arms"]
    if arms and options["ranks"] and not any(differs(*at) for at in product(arms, options["ranks"])):
        raise ValueError(f"arms={','.join(arms)}: nothing else than {arms[0].partition('-')[0]} on so few GPUs")
    options["shapes"] = [step.shape(text) for text in options["shapes"]]
    options["steps"] = step.whole("steps", ",".join(options["steps"]) or "20")
    options["folder"] = ",".join(options["folder"]) or None
    if options["folder"] and not Path(options["folder"]).is_dir():
        raise ValueError(f"folder={options['folder']}: there is no such folder")
    options["out"] = Path(",".join(options["out"]) or report.ASSETS / "gpus.json")
    return kinds, options


# ----------------------------------------------------------------------------------------------------------------------
# Points


def measured(kinds: list[str], options: dict):
    """Kind and row after row; ranks that the GPUs do not suffice for were left out before."""
    for kind in kinds if options["ranks"] else []:
        for row in MEASURES[kind](options):
            yield kind, row


def scaling(options: dict):
    """Many GPUs first, so that one alone is as warm as they were: a cool card clocks higher than it can for long."""
    for ranks in reversed(options["ranks"]):
        yield from points(SCALING_CONFIG, ranks, SCALING_AT, SCALING_ARMS, options)


def big(options: dict):
    shapes, checkpointing = (options[key] for key in ("shapes", "checkpointing"))
    places = [at for at in BIG_AT if (not shapes or at[:2] in shapes) and (not checkpointing or at[2] in checkpointing)]
    if shapes and checkpointing:  # asked for together, also where they are not ours to choose
        places = [(*shape, how) for how in checkpointing for shape in shapes]
    yield from points(BIG_CONFIG, max(options["ranks"]), places, BIG_ARMS, options)


def points(config: str, ranks: int, places: list[tuple], arms: list[str], options: dict):
    """The arms in turn at each place; those that the words name, or else these."""
    missing = set()
    for *shape, checkpointing in places:
        for arm in options["arms"] or arms:
            asked_for = options["arms"] or checkpointing != "selective" or arm == "nanocria"
            if arm in missing or not asked_for or not differs(arm, ranks):
                continue
            row = point(arm, config, ranks, *shape, checkpointing, options["steps"])
            missing |= {arm} if "missing" in row else set()
            yield row


def differs(arm: str, ranks: int) -> bool:
    """Whether the arm's sharding makes it another one than ZeRO-3 on so many ranks."""
    how = arm.partition("-")[2]
    if how == "hybrid":
        return ranks >= 4 and ranks % 2 == 0
    return ranks > 1 or not how


def point(arm: str, config: str, ranks: int, batch: int, block: int, checkpointing: str, steps: int) -> dict:
    at = (config, batch, block, checkpointing, steps)
    if arm == "nanocria-each":
        result = side_by_side(ranks, *at)
    elif arm.startswith("nanocria"):
        result = step.nanocria_point(*at, flag=sharding_flags(arm, ranks), ranks=ranks)
    else:
        result = step.peer_point(arm, *at, ranks=ranks)
    place = dict(zip(PLACE, (arm, ranks, batch, block, checkpointing), strict=True))
    return place | {"steps": steps, "oom": False} | result


def side_by_side(ranks: int, *at) -> dict:
    """A run on each GPU by itself, all at the same time: the tokens of all, the milliseconds of the slowest."""

    def point(_, gpu):
        return step.nanocria_point(*at, launch=functools.partial(step.run, gpu=gpu, gpus=ranks))

    found = list(step.spread(point, range(ranks), ranks))
    if any("tok_per_s" not in point for point in found):
        return next(point for point in found if "tok_per_s" not in point)
    worst = {key: max(point[key] for point in found) for key in ("ms_per_step", "peak_gib", "estimated_gib")}
    mfu = None if found[0]["mfu"] is None else sum(point["mfu"] for point in found) / ranks
    return {"tok_per_s": sum(point["tok_per_s"] for point in found), "mfu": mfu} | worst


def sharding_flags(arm: str, ranks: int) -> str:
    sharding = arm.partition("-")[2] or "zero3"
    if sharding == "nccl":
        return "--copy_engines=false"
    return f"--sharding={sharding}"


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def saves(options: dict):
    """Two runs of SAVE_STEPS, without and with checkpoints, and one that goes on with the last of them.

    What a checkpoint costs is read off the wall: the seconds from the log line of step 100 to that of step 300 hold two
    whole intervals, each with its evaluation, what the main thread does for a save, what the writing beside it takes
    from the steps, and the wait for a save that is not done when the next one is due. They hold neither the start nor
    the last save, after which no training is left to write beside. The resume reads what the system may still have in
    memory.
    """
    ranks = max(options["ranks"])
    row = {"ranks": ranks, "batch": SAVES_AT[0], "block": SAVES_AT[1], "every": SAVE_EVERY}
    with tempfile.TemporaryDirectory(dir=options["folder"]) as folder:
        without = timed_run(f"{folder}/without", ranks, "--keep_last=0", SAVE_STEPS)
        beside = without if trouble(without) else timed_run(f"{folder}/with", ranks, "--keep_last=1", SAVE_STEPS)
        if trouble(beside):
            yield row | trouble(beside)
            return
        path = run_folder.newest(f"{folder}/with")
        if path is None:
            yield row | {"failed": f"no checkpoint was written to {options['folder'] or tempfile.gettempdir()}"}
            return
        n_bytes = sum(file.stat().st_size for file in path.iterdir())
        resumed = timed_run(f"{folder}/with", ranks, "--keep_last=0", SAVE_STEPS + 10)
    yield row | {
        "oom": False,
        "seconds_without": without["wall_seconds"],
        "seconds_with": beside["wall_seconds"],
        "cost": beside["wall_seconds"] / without["wall_seconds"] - 1,
        "save_seconds": beside.get("save_seconds"),  # of the main thread, the last save's too
        "checkpoint_bytes": n_bytes,
        "resume_seconds": resumed.get("resume_seconds") if resumed.get("steps") == 10 else None,
    }


def trouble(result: dict) -> dict:
    return {key: result[key] for key in ("oom", "failed") if result.get(key)}


def timed_run(out_dir: str, ranks: int, flag: str, max_iters: int) -> dict:
    """The summary of a run of train.py, with the wall_seconds between its log lines of SAVE_EVERY and SAVE_STEPS."""
    words = step.train_words(SCALING_CONFIG, *SAVES_AT, out_dir, ranks)
    words += [f"--eval_interval={SAVE_EVERY}", f"--max_iters={max_iters}", flag]
    arrived, over = {}, threading.Event()
    clock = threading.Thread(target=note_arrivals, args=(Path(out_dir) / "metrics.jsonl", arrived, over))
    clock.start()
    try:
        summary = step.train(words, out_dir, ranks)
    finally:
        over.set()
        clock.join()
    if SAVE_EVERY in arrived and SAVE_STEPS in arrived:
        summary["wall_seconds"] = arrived[SAVE_STEPS] - arrived[SAVE_EVERY]
    return summary


def note_arrivals(path: Path, arrived: dict[int, float], over: threading.Event) -> None:
    """When the log line of each step came to the file, to 20 ms."""
    while not over.wait(0.02):
        for line in path.read_text().splitlines() if path.exists() else []:
            if '"loss"' in line and line.endswith("}"):
                arrived.setdefault(json.loads(line)["step"], time.perf_counter())


MEASURES = {"scaling": scaling, "8b": big, "saves": saves}


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons


def done(rows: list[dict]) -> dict[tuple, dict]:
    return {tuple(row[key] for key in PLACE): row for row in rows if "tok_per_s" in row}


def efficiency(row: dict, rows: list[dict]) -> float | None:
    """Tokens a second over those of one GPU times the number of GPUs; None without the same trainer on one GPU."""
    arm, ranks, *where = (row[key] for key in PLACE)
    alone = done(rows).get((arm.partition("-")[0], 1, *where))
    return row["tok_per_s"] / ranks / alone["tok_per_s"] if alone else None


def ratios(row: dict, rows: list[dict]) -> dict | None:
    """Of nanocria's row: speed and memory over those of torchtitan's recipe, sharded alike, at the same place.

    Selective checkpointing is compared with the recipe's full one where its selective was not measured.
    """
    arm, *where, checkpointing = (row[key] for key in PLACE)
    peers = {"nanocria": "recipe", "nanocria-zero2": "recipe-zero2"}
    for theirs in dict.fromkeys([checkpointing, "full" if checkpointing == "selective" else checkpointing]):
        peer = done(rows).get((peers.get(arm), *where, theirs))
        if peer:
            return {"peer": peer["arm"], "checkpointing": theirs} | {
                key: row[key] / peer[key] for key in ("tok_per_s", "peak_gib")
            }
    return None


# ----------------------------------------------------------------------------------------------------------------------
# What one sees


def line(row: dict, record: dict) -> str:
    """A row of the record as one reads it while the run goes on."""
    gpus = f"{row['ranks']} GPU{'s' if row['ranks'] > 1 else ' '} {row['batch']:>2} x {row['block']}"
    if "every" in row:
        return f"{gpus}  {saves_sentence(row) if not trouble(row) else step.trouble(row)}"
    name = f"{ARMS[row['arm']]:<28} {gpus} {row['checkpointing']:<9}"
    if "tok_per_s" not in row:
        return f"{name}  {step.trouble(row)}"
    rows = [*record["scaling"], *record["8b"]]
    text = f"{name} {row['tok_per_s']:9,.0f} tok/s  {row['tok_per_s'] / row['ranks']:8,.0f} a GPU  "
    text += f"mfu {step.share(row['mfu'])}  {row['peak_gib']:6.1f} GiB"
    if row.get("estimated_gib"):
        text += f" ({row['estimated_gib'] / row['peak_gib']:.2f} x it estimated)"
    if row["ranks"] > 1 and efficiency(row, rows):
        text += f"  {efficiency(row, rows):.3f} of {row['ranks']} x one GPU"
    found = ratios(row, rows)
    return text + (f"  {versus(found)}" if found else "")


def versus(found: dict) -> str:
    peer = f"{found['peer']}, checkpointing {found['checkpointing']}"
    return f"{found['tok_per_s']:.3f} x the speed, {found['peak_gib']:.2f} x the memory of {peer}"


def saves_sentence(row: dict) -> str:
    text = (
        f"a checkpoint of {row['checkpoint_bytes'] / 1e9:.1f} GB every {row['every']} steps costs the training "
        f"{row['cost']:.1%} ({row['seconds_without'] / 2:.1f} s without, {row['seconds_with'] / 2:.1f} s with)"
    )
    seconds = row["resume_seconds"]
    return text + ("; it was not resumed" if seconds is None else f"; a resume reads it in {seconds:.1f} s")


def cells(row: dict, rows: list[dict], comparison: str) -> list[str]:
    if "tok_per_s" not in row:
        return ["out of memory", *["-"] * 5]
    estimated = f"{row['estimated_gib'] / row['peak_gib']:.2f}" if row.get("estimated_gib") else "-"
    a_gpu = [f"{row['tok_per_s']:,.0f}", f"{row['tok_per_s'] / row['ranks']:,.0f}"]
    return [*a_gpu, comparison, step.share(row["mfu"]).strip(), f"{row['peak_gib']:.1f}", estimated]


def header(comparison: str) -> list[str]:
    return ["tok/s", "tok/s per GPU", comparison, "MFU", "peak GiB", "estimated / peak"]


def scaling_table(record: dict) -> str:
    rows = []
    for row in sorted(record["scaling"], key=lambda row: row["ranks"]):
        share = efficiency(row, record["scaling"]) if "tok_per_s" in row else None
        comparison = "-" if share is None else f"{share:.3f}"
        name = ARMS[row["arm"]] if row["ranks"] > 1 else ARMS[row["arm"]].partition(",")[0]  # one is not sharded
        rows.append([name, str(row["ranks"]), *cells(row, record["scaling"], comparison)])
    return report.table(["trainer", "GPUs", *header("scaling efficiency")], rows)


def big_table(record: dict) -> str:
    rows = []
    for row in record["8b"]:
        found = ratios(row, record["8b"]) if "tok_per_s" in row else None
        other = f" (vs. {found['checkpointing']})" if found and found["checkpointing"] != row["checkpointing"] else ""
        comparison = f"{found['tok_per_s']:.3f} · {found['peak_gib']:.2f}{other}" if found else "-"
        where = [f"{row['batch']} x {row['block']:,}", row["checkpointing"], ARMS[row["arm"]]]
        rows.append([*where, *cells(row, record["8b"], comparison)])
    first = ["sequences x tokens per GPU", "checkpointing", "trainer"]
    return report.table([*first, *header("speed · memory vs. recipe")], rows)


def main(words: list[str]) -> None:
    try:
        kinds, options = parse(words, torch.cuda.device_count())
    except ValueError as error:
        sys.exit(str(error))
    new = step.begin("gpus", words, ROWS, PACKAGES)
    new["device"] = f"{torch.cuda.device_count()} x {new['device']}"
    record, failed = step.fill(new, measured(kinds, options), options["out"], ROWS, line)
    rows = [row for kind in ("scaling", "8b") for row in record[kind] if "tok_per_s" in row]
    compared = []
    for row in rows:
        found, share = ratios(row, rows), efficiency(row, rows) if row["ranks"] > 1 else None
        if found or share:
            compared.append({"at": [row[key] for key in PLACE], "of_linear": share, "ratios": found})
    costs = [{key: row.get(key) for key in ("ranks", "cost", "resume_seconds")} for row in record["saves"]]
    print(json.dumps({"record": str(options["out"]), "failed": failed, "compared": compared, "saves": costs}))
