"""What fits on the card: batch and context grow until nothing fits, against other frameworks.

    python bench.py                               batches of Llama 3.2 1B, sequences of 1,024 tokens, on this card
    python bench.py --sweep=both --peers=hf,liger          contexts too, at batch 4, and beside two others
    python bench.py --memory_limit_gib=24 --checkpointing=full --offload=none,optimizer,all --arms=all,long
    python bench.py --preset=study                24 GiB, offload=all, full checkpointing: our arms beside hf and liger
    python bench.py --preset=8b                   Llama 3.1 8B, sequences of 512 tokens, on all GPUs, beside the recipe
    python bench.py -- --mlp_chunks=4             arguments after -- go to train.py, for ours alone

    python bench.py --preset=finetune             24 GiB, Llama 3.1 8B with adapters, beside peft and bitsandbytes: the
                                                  fastest settings at each size

arms    all: train.py as it is; kernels: without the fused loss; torch: also without the kernels of norms, RoPE, MLP and
        attention; long: all, with --offload_activations=true; lora, qlora: adapters on a base in bfloat16, in NF4;
        lora-fp8, qlora-fp8: the base multiplied in float8; or none
peers   hf: transformers' LlamaForCausalLM; liger: with Liger-Kernel's patches; recipe: see benchmarks/peers.py; or
        none. Like ours they keep float32 weights and compute in bfloat16. hf and liger offload all or nothing, through
        FSDP2: when ours has the optimizer on the CPU, they have weights and gradients there too. peft, peft-qlora,
        liger-8bit, liger-galore: liger in pure bfloat16, with another package's technique.

Each point is a separate process, measured on the real step: forward, backward, clip, update. A series ends at the
first size that fails. A plot is drawn beside the record. A sweep that was stopped continues where the record of the
same code, card and --steps ends; delete that to measure it again.
"""

import itertools
import shlex
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Literal

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner
from benchmarks.estimate import cpu_gib_of, resolve, run_of
from configurator import SettingError
from runtime import memory, memory_stats

# settings
preset: Literal["study", "8b", "finetune"] | None = None  # a set of settings, which other flags override
sweep: Literal["batch", "seq", "both"] = "batch"  # what grows: batches, contexts
arms = "all"  # ours: see above
peers = "none"  # to compare with: see above
config = "config/llama32_1b.py"  # the model
memory_limit_gib: float | None = None  # as if the card had only so many GiB
checkpointing = "none"  # one or several of none, selective, full
offload = "none"  # one or several of none, optimizer, all
batches = ""  # for sweep=batch, one,two,...; default: 1 to 112, then doubled until none fits
contexts = ""  # for sweep=seq; default: 512 to 131,072
block_size = 1024  # of the batches
batch_size = 4  # of the contexts
steps: int | None = None  # to measure; none: 10, fewer if they are long
ranks: int | Literal["all"] = 1  # GPUs of a point
keep = False  # keep rows measured with older code: for changes that affect neither time nor memory
out = ""  # the record; default: out/sweep.json, or a preset's in benchmarks/records

BATCHES = [1, 4, 8, 16, 32, 64, 96, 112]  # the study's; then doubled
CONTEXTS = [512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 65536, 131072]
PRESETS = {
    "study": ["--sweep=both", "--arms=torch,kernels,all,long", "--peers=hf,liger", "--memory_limit_gib=24",
              "--checkpointing=full", "--offload=all", f"--out={record.RECORDS / 'study.json'}"],
    "8b": ["--config=config/llama31_8b.py", "--block_size=512", "--ranks=all", "--peers=recipe", "--checkpointing=full",
           f"--out={record.RECORDS / 'study_8b.json'}"],
    "finetune": ["--config=config/llama31_8b.py", "--block_size=2048", "--batches=2", "--arms=qlora",
                 "--memory_limit_gib=24", "--checkpointing=full", f"--out={record.RECORDS / 'finetune.json'}"],
}  # fmt: skip
FINETUNE = [  # the fastest settings at each size, ours and then theirs; at the smallest also the leanest
    "--checkpointing=none --peers=peft-qlora -- --cuda_graph=true",  # theirs does not fit
    "--arms=lora-fp8,qlora-fp8 --checkpointing=none -- --cuda_graph=true",
    "--arms=lora --checkpointing=selective -- --cuda_graph=true",
    "--arms=none --peers=peft,peft-qlora",
    "-- --offload_activations=true",
    "--block_size=8192 --batches=1,4 --checkpointing=selective -- --offload_activations=true",
    "--block_size=8192 --batches=1,4 --arms=lora-fp8,qlora-fp8 --checkpointing=selective -- --offload_activations=true",
    "--block_size=8192 --batches=1,4 --arms=none --peers=peft-qlora",
    "--block_size=32768 --batches=1 --checkpointing=selective -- --offload_activations=true",
    "--block_size=32768 --batches=1 --arms=lora-fp8,qlora-fp8 --checkpointing=selective -- --offload_activations=true",
    "--block_size=32768 --batches=1 --arms=none --peers=peft-qlora",
    "--block_size=65536 --batches=1 --arms=none --peers=peft-qlora",
    "--block_size=131072 --batches=1 --arms=qlora,qlora-fp8 -- --offload_activations=true",
]
LISTS = {
    "arms": [*trainers.SWEEP_FLAGS, "none"], "peers": [*trainers.SWEEP_PEERS, "none"],
    "checkpointing": runner.CHECKPOINTING, "offload": runner.OFFLOAD,
    "batches": cli.whole_numbers, "contexts": cli.whole_numbers,
}  # fmt: skip
KEYS = dict.fromkeys(compare.KINDS, compare.SWEEP_PLACE)  # what identifies a row


def all_sweeps(argv: list[str], n_gpus: int) -> list[SimpleNamespace]:
    """The settings of one sweep, or of those that --preset=finetune runs one after another."""
    s = parse(argv, n_gpus)
    return [parse(argv, n_gpus, part.split()) for part in FINETUNE] if s.preset == "finetune" else [s]


def parse(argv: list[str], n_gpus: int, part: Iterable[str] = ()) -> SimpleNamespace:
    typed = cli.read_settings(globals(), argv, for_train_py=True)
    (words, flags), (asked, more) = cli.at_dashes([*PRESETS.get(typed.preset, []), *part]), cli.at_dashes(argv)
    words = [*words, *asked, "--", *flags, *more]
    s = cli.read_settings(globals(), words, LISTS, "out/sweep.json", for_train_py=True)
    s.command = typed.command
    s.batches, s.contexts = sorted(s.batches), sorted(s.contexts)
    s.ranks = max(n_gpus, 1) if s.ranks == "all" else s.ranks
    if s.ranks > max(n_gpus, 1):
        raise SettingError(f"--ranks={s.ranks}: torch sees {n_gpus} GPU{'s' * (n_gpus != 1)}")
    # Check that the file exists and train.py accepts it. full: it conflicts with no other setting.
    resolve(s.config, s.ranks, {"activation_checkpointing": "full", "gradient_accumulation_steps": s.ranks}, s.flags)
    return s


def all_series(s: SimpleNamespace) -> list[tuple[str, str, str]]:
    """Arm, checkpointing and offload of each series, ours before the peers, without what a peer cannot do.

    A peer offloads all or nothing; of the peers only the recipe has selective checkpointing.
    """
    found = []
    for checkpointing, offload in itertools.product(s.checkpointing, s.offload):
        found += [(arm, checkpointing, offload) for arm in s.arms if arm != "none"]
        offload = "none" if offload == "none" else "all"
        peers = [peer for peer in s.peers if offload in trainers.SWEEP_PEERS.get(peer, ())]
        peers = [peer for peer in peers if peer == "recipe" or checkpointing != "selective"]
        found += [(peer, checkpointing, offload) for peer in peers]
    return list(dict.fromkeys(found))


def measured(s: SimpleNamespace, known: dict | None = None):
    """Yield kind and row: at each size the series in turn, until each has met a size that fails.

    known: rows that need not be measured, by place. The second sweep reuses what the first has measured.
    """
    known = dict(known or {})
    for kind in compare.KINDS if s.sweep == "both" else [s.sweep]:
        going = all_series(s)
        for batch, block in sizes(kind, s):
            for series in list(going):
                row = place(*series, batch, block, s)
                name = tuple(row.values())
                known[name] = known[name] if name in known else point(row, s.steps)
                if "tok_per_s" not in known[name]:
                    going.remove(series)
                yield kind, known[name]
            if not going:
                break


def sizes(kind: str, s: SimpleNamespace):
    """Batch and block, in growing order; batches without end."""
    if kind == "seq":
        return ((s.batch_size, block) for block in s.contexts or CONTEXTS)
    doubled = (2**k * BATCHES[-1] for k in itertools.count(1))
    return ((batch, s.block_size) for batch in s.batches or itertools.chain(BATCHES, doubled))


def place(arm: str, checkpointing: str, offload: str, batch: int, block: int, s: SimpleNamespace) -> dict:
    flags = shlex.join(s.flags) if arm in trainers.SWEEP_FLAGS else ""
    where = (s.config, arm, s.ranks, batch, block, checkpointing, offload)
    return dict(zip(compare.SWEEP_PLACE, (*where, s.memory_limit_gib, flags), strict=True))


def point(row: dict, steps: int | None = None) -> dict:
    """The row of this place, with its measurement or why there is none. steps: to measure; None: n_steps()."""
    arm, offload = row["arm"], row["offload"]
    ours = arm in trainers.SWEEP_FLAGS
    try:
        row |= {"estimated_gib": memory.peak_gib(*run_of(row))} if ours else {}
    except SettingError as error:  # train.py would reject it
        return row | {"failed": str(error)}
    needed, there = cpu_gib_of(row), memory_stats.cpu_available() / 2**30
    if needed > there:
        return row | {"failed": f"offload={offload} needs {needed:.1f} GiB of CPU memory, this machine has {there:.1f}"}
    warmup, usual = n_steps(row["batch"] * row["block"])
    warmup += "--cuda_graph=true" in row["flags"]  # the step that records the graph takes longer
    at = {key: row[key] for key in ("config", "batch", "block", "checkpointing", "ranks")}
    limit = ["-m", "benchmarks.limited", f"{row['limit_gib']:g}"] if row["limit_gib"] else []
    at |= {"steps": steps or usual, "warmup": warmup, "before": limit}
    flags = shlex.split(row["flags"])
    if any(flag.startswith("--lora_rank") for flag in [*trainers.SWEEP_FLAGS.get(arm, []), *flags]):
        flags.append(f"--init_from={runner.random_base(row['config']).name}")
    return row | runner.sweep_point(arm, offload, flags, **at)


def n_steps(tokens: int) -> tuple[int, int]:
    """Steps to warm up, and to measure: fewer if they are long. 4 x 131,072 tokens take a minute."""
    return (2 if tokens < 2**18 else 1), max(1, min(10, 2**19 // tokens))


def known_rows(new: dict, s: SimpleNamespace) -> dict:
    """The rows of a record that the new one continues, by place, if measured over as many steps."""
    kept = record.kept_rows(new, s.out, KEYS, s.keep)
    for row in kept.values():  # a plot has one title
        if (row["config"], row["ranks"], row["limit_gib"]) != (s.config, s.ranks, s.memory_limit_gib):
            limit = f"memory_limit_gib={row['limit_gib']}"
            raise SettingError(f"{s.out} is of {row['config']}, ranks={row['ranks']}, {limit}: name another --out")
    return {
        name: row
        for name, row in kept.items()
        if row.get("oom") or row.get("steps") == (s.steps or n_steps(row["batch"] * row["block"])[1])
    }


def main(argv: list[str]) -> None:
    first, *others = all_sweeps(argv, torch.cuda.device_count())

    def rows(s):
        known = known_rows(s.new, s)
        if known:
            print(f"{s.out} has {len(known)} points already: delete it to measure them again")
        return itertools.chain.from_iterable(measured(each, known) for each in [s, *others])

    runner.measure("", first, KEYS, rows, trainers.SWEEP, "draw_sweep", n_gpus=first.ranks)
