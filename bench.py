"""The numbers: benchmarks leave records, records become the tables and plots of the README.

    python bench.py                             what fits in this card: batches of Llama 3.2 1B grow until none does
    python bench.py preset=study                in 24 GiB, beside Hugging Face and Liger (benchmarks/sweep.py)
    python bench.py estimate card=4090          what fits, by arithmetic, without a GPU (benchmarks/estimate.py)
    python bench.py snapshot                    what holds the memory in one step (benchmarks/snapshot.py)
    python bench.py kernels                     every kernel beside eager PyTorch, torch.compile and other libraries:
                                                time, memory, error; to assets/kernels.json (a GPU, some minutes)
    python bench.py kernels op=rope,swiglu      some of them, to out/kernels.json
    python bench.py step                        where the time of a training step goes (benchmarks/step.py)
    python bench.py gpus                        several GPUs: scaling, 8B, checkpoints (benchmarks/gpus.py)
    python bench.py record FOLDER NAME          keeps the summary.json that a training run left in FOLDER
                                                as assets/NAME.json
    python bench.py readme                      draws the plots and writes the tables of README.md

What the README says was measured stands between two of its markers and comes from a record; test_bench.py compares.
"""

import difflib
import sys

COMMANDS = ["estimate", "snapshot", "kernels", "step", "gpus", "record", "readme"]


def main(argv: list[str]) -> None:
    match argv:
        case words if all("=" in word for word in words):
            from benchmarks import sweep

            sweep.main(words)
        case ["estimate", *words]:
            from benchmarks import estimate

            estimate.main(words)
        case ["snapshot", *words]:
            from benchmarks import snapshot

            snapshot.main(words)
        case ["kernels", *words]:
            from benchmarks import kernels

            kernels.main(words)
        case ["step", *words]:
            from benchmarks import step

            step.main(words)
        case ["gpus", *words]:
            from benchmarks import gpus

            gpus.main(words)
        case ["record", folder, name]:
            from benchmarks import report

            report.keep(folder, name)
        case ["readme"]:
            from benchmarks import report

            report.write_readme()
        case [word, *_]:
            near = difflib.get_close_matches(word, COMMANDS, 1)
            sys.exit(f"{__doc__}\nUnknown word {word}" + (f". Did you mean {near[0]}?" if near else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
