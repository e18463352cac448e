"""The numbers: benchmarks leave records, records become the tables and plots of README.md and benchmarks/README.md.

    python bench.py                             what fits in this card: batches of Llama 3.2 1B grow until none does
    python bench.py preset=study                in 24 GiB, beside Hugging Face and Liger (benchmarks/sweep.py)
    python bench.py sweep --help                its other words; likewise for each command below
    python bench.py estimate card=4090          what fits, by arithmetic, without a GPU (benchmarks/estimate.py)
    python bench.py snapshot                    what holds the memory in one step (benchmarks/snapshot.py)
    python bench.py kernels                     every kernel beside eager PyTorch, torch.compile and other libraries:
                                                time, memory, error; to benchmarks/records/kernels.json (a GPU, some minutes)
    python bench.py kernels op=rope,swiglu      some of them, to out/kernels.json
    python bench.py step                        the whole training step, beside other trainers (benchmarks/step.py)
    python bench.py step breakdown              where its time goes
    python bench.py losses                      is what it learns the same? beside Hugging Face's model in bfloat16 and
                                                float32, from the same weights (benchmarks/losses.py)
    python bench.py gpus                        several GPUs: scaling, 8B, checkpoints (benchmarks/gpus.py)
    python bench.py record FOLDER NAME          keeps the summary.json that a training run left in FOLDER
                                                as benchmarks/records/NAME.json
    python bench.py readme                      draws the plots and writes the tables of both pages

Tables of what was measured stand between markers and are made from records; test_bench.py compares them.
"""

import difflib
import importlib
import os
import sys

MODULES = ["sweep", "estimate", "snapshot", "kernels", "step", "losses", "gpus"]  # of benchmarks/
COMMANDS = [*MODULES, "record", "readme"]


def main(argv: list[str]) -> None:
    match argv:
        case words if all("=" in word for word in words):
            main(["sweep", *words])
        case [command, *words] if command in MODULES:
            module = importlib.import_module(f"benchmarks.{command}")
            if asks_for_help(words):
                print(module.__doc__.strip())
            else:
                module.main(words)
        case words if words[0] == "help" or asks_for_help(words):
            print(__doc__.strip())
        case ["record", folder, name]:
            from benchmarks import report

            report.keep(folder, name)
        case ["readme"]:
            from benchmarks import report

            try:
                report.write_pages()
            except (OSError, ValueError) as error:  # a record that is missing or broken, which it names
                sys.exit(str(error))
        case ["record" | "readme", *_]:
            sys.exit("usage: python bench.py record FOLDER NAME\n       python bench.py readme")
        case words:
            unknown = next(word for word in words if "=" not in word)
            sys.exit(f"{__doc__}\nUnknown word {unknown}{hint(unknown)}")


def asks_for_help(words: list[str]) -> bool:
    return "--help" in words or "-h" in words


def hint(word: str) -> str:
    if word.startswith("--"):
        return f": say {word}=..."
    if word in COMMANDS:
        return f": it comes first, python bench.py {word}"
    near = difflib.get_close_matches(word, COMMANDS, 1)
    return f". Did you mean {near[0]}?" if near else ""


if __name__ == "__main__":
    try:
        try:
            main(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, and not when the interpreter ends
    except BrokenPipeError:  # whoever reads has read enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
