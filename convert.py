"""Convert any weights that nanocria reads to a folder with Hugging Face's config.json and .safetensors files.

    python convert.py Llama3.2-1B my-llama                             Meta's format, params.json and a .pth
    python convert.py out/llama32_1b my-llama --dtype float32          a run's newest checkpoint: its master weights
    python convert.py Llama-3.2-1B my-llama --dtype float16
    python convert.py out/qlora my-llama --merge original              adapters, merged into the published weights

Adapters are merged into the published weights, even if trained with --fp8. Adapters on an NF4 base are merged into the
dequantized weights that they were trained on or, with --merge original, into the published ones, without NF4's error.
You do not need convert.py to use a run: a checkpoint is such a folder, and train.py and sample.py read all of these.
"""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))  # python -I and PYTHONSAFEPATH=1 leave it out
from lora import merge_lora
from runtime import run_folder
from runtime.checkpoint import load_model
from runtime.checkpoint_folder import open_folder, write_folder
from runtime.hf_config import model_type, read_config
from runtime.hf_names import hf_rows
from runtime.restore import documents


def convert(source: Path, folder: Path, dtype: str, merge: str = "trained") -> str | None:
    """Write the model load_model(source) to `folder`, which appears only when it is complete; merge: see above.

    Returns the folder of the base that adapters were merged into. Raises ValueError or OSError if `source` cannot be
    read, ValueError if `folder` cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    opened = open_folder(source)
    tokenizer = read_config(opened)[1]
    if merge == "original" and not opened.adapter:
        raise ValueError(f"--merge is for adapters, and {source} has none: leave it out")
    if os.path.lexists(partial):  # it may be the user's
        raise ValueError(f"{partial} already exists: remove it, or name another folder")
    try:
        partial.mkdir(parents=True)  # fails before the weights are read
        quantize_base = "none" if merge == "original" else None
        model = load_model(source, "cpu", getattr(torch, dtype), quantize_base=quantize_base)
        merge_lora(model)
        rows = [row for name, p in model.named_parameters() for row in hf_rows(name, p, model.config)]
        dataset = (opened.run or {}).get("dataset", {})
        others = documents(opened, model.config, tokenizer, dtype, dataset)
        run = {"converted_from": str(source)} | ({"dataset": dataset} if dataset else {})
        write_folder(partial, {"model": rows}, others, run)
        run_folder.commit(partial, folder)
        return opened.adapter and opened.adapter["base_model_name_or_path"]
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run (its newest checkpoint), a checkpoint or published weights")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of weights")
    parser.add_argument("--merge", choices=["trained", "original"], default="trained", help="the base for adapters")
    args = parser.parse_args()
    if os.path.lexists(args.folder):
        sys.exit(f"{args.folder} already exists: name a new folder")

    def write(path):
        base = convert(path, args.folder, args.dtype, args.merge)
        merged = f", merged into {base}," if base else ""
        reader = f'transformers.AutoModelForCausalLM.from_pretrained("{args.folder}")'
        if model_type() != "llama":  # model.py was changed
            reader = f"python sample.py --out_dir={shlex.quote(str(args.folder))}"
        print(f"{path}{merged} in {args.dtype}: {reader}")

    try:
        run_folder.read_newest(args.source, write)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
