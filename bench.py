"""Run benchmarks, and turn their records into the tables of benchmarks/README.md and the plots of both pages.

    python bench.py                             what fits in this card: the batch of Llama 3.2 1B grows up to the limit
    python bench.py --preset=study              in 24 GiB, against Hugging Face and Liger
    python bench.py --preset=finetune           8B with adapters, against peft and bitsandbytes
    python bench.py sweep --help                its other settings; likewise for each command below
    python bench.py estimate --card=4090        what fits, by arithmetic, without a GPU
    python bench.py ladder                      each memory technique on top of another, within 24 GiB
    python bench.py snapshot                    what holds the memory in one step
    python bench.py kernels                     every kernel against eager PyTorch, torch.compile and other libraries
    python bench.py step                        the whole training step, against other trainers
    python bench.py losses                      does it learn the same as Hugging Face's model?
    python bench.py finetune --init_from=FOLDER does a finetune learn the same? is packing faster?
    python bench.py gpus                        several GPUs: scaling, 8B, checkpoints
    python bench.py disk --offload_dir=FOLDER   an update through a drive, against plain reads and writes
    python bench.py generate                    generated tokens per second, against transformers.generate
    python bench.py plan                        what more GPUs than were measured would reach, by arithmetic
    python bench.py run FOLDER...               plots and tabulates the losses of training runs
    python bench.py record FOLDER NAME          saves a training run's summary.json and validation
                                                losses as benchmarks/records/NAME.json
    python bench.py readme                      draws the plots and writes benchmarks/README.md's tables

Every setting is --key=value; COMMAND --help lists them. What is measured is written to out/, or to --out=FILE.
"""

import importlib
import sys

from configurator import SettingError

COMMANDS = ["sweep", "estimate", "ladder", "snapshot", "kernels", "step", "losses", "finetune", "gpus", "disk",
            "generate", "plan", "run"]  # fmt: skip


def main(argv: list[str]) -> None:
    try:
        match argv:
            case ["help" | "--help" | "-h", *_]:
                print(__doc__.strip())
            case [command, *rest] if command in COMMANDS:
                importlib.import_module(f"benchmarks.{command}").main(rest)
            case ["record", folder, name]:
                from benchmarks import records

                records.keep_summary(folder, name)
            case ["readme"]:
                from benchmarks import plots, tables

                tables.write_page()
                plots.draw_all()
            case [command, *_] if not command.startswith("-"):
                sys.exit(f"Unknown command {command}: there are {', '.join(COMMANDS)}, record FOLDER NAME, readme")
            case _:
                main(["sweep", *argv])
    except SettingError as error:  # a user error
        sys.exit(str(error))
    except ModuleNotFoundError as error:  # of a package that this command alone needs
        sys.exit(f"{error}: pip install {error.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
