"""The numbers: records in assets/ become the plot and the tables of the README.

    python train.py config/baby_llama.py --out_dir=out/cpu            # any run leaves out/cpu/summary.json
    python bench.py record out/cpu baby_llama_cpu                     # keeps it as assets/baby_llama_cpu.json
    python bench.py readme                                            # draws the plot, writes the tables

Every number in the README stands between two of its markers and comes from a record; test_bench.py compares them.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ASSETS = ROOT / "assets"


def load(name: str) -> dict:
    """A record: what a named command wrote, with device, versions and commit."""
    return json.loads((ASSETS / f"{name}.json").read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def baby_table() -> str:
    """The baby's runs: how long, how good, beside two compressors that read the same bytes."""
    rows = []
    for name in ("baby_llama_cpu", "baby_llama_gpu"):
        r = load(name)
        bits = [f"{r[key]:.2f}" for key in ("bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")]
        rows.append([f"`{r['command']}`", r["device"].removeprefix("1 x "), f"{r['train_seconds'] / 60:.1f}", *bits])
    return table(["command", "device", "minutes", "bits per byte", "gzip -9", "xz -9"], rows)


LLAMA32_1B = ("llama32_1b_b8", "llama32_1b_b16", "llama32_1b_b8_selective", "llama32_1b_b8_full")


def llama32_1b_table() -> str:
    """Speed and memory of training the 1B model on one GPU."""
    rows = []
    for r in map(load, LLAMA32_1B):
        s = r["settings"]
        shape = [f"{s['batch_size']} x {s['block_size']:,}", s["activation_checkpointing"]]
        speed = [f"{r['tok_per_s']:,.0f}", f"{r['mfu']:.1%}", f"{r['ms_per_step']:.0f}", f"{r['peak_gib']:.1f}"]
        rows.append([*shape, *speed])
    header = ["sequences x tokens", "activation checkpointing", "tok/s", "MFU", "ms a step", "peak GiB"]
    return table(header, rows)


def headline() -> str:
    r, cpu = load("llama32_1b_b16"), load("baby_llama_cpu")
    return (
        f"Llama 3.2 1B trains at {r['tok_per_s']:,.0f} tokens a second ({r['mfu']:.0%} of the card's peak) in "
        f"{r['peak_gib']:.0f} GiB of one {r['device'].removeprefix('1 x ')}; the baby below needs "
        f"{cpu['train_seconds'] / 60:.0f} minutes of a CPU."
    )


def commands() -> str:
    """The command behind each row of the 1B table, and what it ran on."""
    r = load(LLAMA32_1B[0])
    versions = ", ".join(f"{name} {version}" for name, version in r["versions"].items())
    lines = [load(name)["command"] for name in LLAMA32_1B]
    return "\n".join([f"measured on one {r['device'].removeprefix('1 x ')} ({versions}) by", "", "```", *lines, "```"])


PARTS = {"headline": headline, "baby": baby_table, "llama32_1b": llama32_1b_table, "commands": commands}


def render(text: str) -> str:
    """The README with each part between <!-- name --> and <!-- /name --> made anew from the records."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md must hold {begin} and {end} once each")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{part()}\n{end}{rest.partition(end)[2]}"
    return text


def draw_baby(path: Path) -> None:
    """Training loss in bits per byte over seconds, CPU and GPU, with gzip and xz as lines to cross."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=150)
    for name, color in (("baby_llama_cpu", "tab:blue"), ("baby_llama_gpu", "tab:green")):
        r = load(name)
        _, seconds, losses = zip(*r["curve"], strict=True)
        label = f"{r['device'].removeprefix('1 x ')}: {r['bits_per_byte']:.2f} on validation"
        axes.plot(seconds, [loss / math.log(2) for loss in losses], color=color, label=label)
        axes.plot(seconds[-1], r["bits_per_byte"], "o", color=color)
    for name, style in (("gzip", "--"), ("xz", ":")):
        level = load("baby_llama_cpu")[f"{name}_bits_per_byte"]
        axes.axhline(level, color="gray", linestyle=style, linewidth=1)
        axes.annotate(
            f"{name} -9", (1.01, level), xycoords=("axes fraction", "data"), color="gray", fontsize=8, va="center"
        )
    axes.set(xlabel="seconds of training", ylabel="bits per byte", xscale="log", ylim=(1, 3.5))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title("A 0.8-million-parameter Llama learns Python (lines: training, dots: validation)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str]) -> None:
    match argv:
        case ["record", out_dir, name]:
            ASSETS.mkdir(exist_ok=True)
            (ASSETS / f"{name}.json").write_text((Path(out_dir) / "summary.json").read_text())
        case ["readme"]:
            readme = ROOT / "README.md"
            readme.write_text(render(readme.read_text()))
            draw_baby(ASSETS / "baby_llama.png")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
