"""llama.cpp reads checkpoints as they are. LLAMA_CPP: a folder of its sources with npm's node-llama-cpp (.ci/run)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from data.tokenizer import get_tokenizer, tokenizer_of
from data.write import write_dataset
from runtime.checkpoint import load_model
from tests.published import smollm2
from tests.runs import prose

LLAMA_CPP = os.environ.get("LLAMA_CPP")
DRAW = """
const [folder, modelPath, text, n] = process.argv.slice(2)
const {getLlama} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`)
const llama = await getLlama({gpu: false, maxThreads: 1, build: "never", logLevel: "error"})
const model = await llama.loadModel({modelPath})
const context = await model.createContext({contextSize: 64})
const ids = model.tokenize(text)
for await (const id of context.getSequence().evaluate([...ids], {temperature: 0}))
    if (ids.push(id) == +n) break
console.log(JSON.stringify(ids))
process.exit(0)
"""


@pytest.mark.real
@pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP names no folder")
@pytest.mark.parametrize("text, n", [("and the 🦙 is", 32), ("The capital of France is", 20)], ids=["bytes", "SmolLM2"])
def test_llama_cpp_has_our_ids_and_our_greedy_tokens(train, tmp_path, plain_pytorch_on_one_core, text, n):
    if "France" in text:
        smollm2(tmp_path / "hf", weights=True)
        documents = [("train", prose(0, 500)), ("val", prose(1, 500))]
        write_dataset(tmp_path / "data", documents, get_tokenizer(tmp_path / "hf"))
        small = dict(block_size=32, batch_size=1, gradient_accumulation_steps=1, max_iters=2, eval_iters=1)
        train("config/sft.py", init_from=tmp_path / "hf", dataset=tmp_path / "data", device="cpu", **small)
    else:
        train(max_iters=200, eval_interval=200)
    (checkpoint,) = (tmp_path / "out").glob("step_*")
    ids = tokenizer_of(checkpoint).encode(text)
    model = load_model(checkpoint)
    with torch.no_grad():
        while len(ids) < n:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    gguf = tmp_path / "model.gguf"
    script = f"{LLAMA_CPP}/convert_hf_to_gguf.py"
    subprocess.run([sys.executable, script, checkpoint, "--outtype=f32", f"--outfile={gguf}"], check=True)
    (tmp_path / "draw.mjs").write_text(DRAW)
    command = ["node", tmp_path / "draw.mjs", LLAMA_CPP, gguf, text, str(n)]
    theirs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert theirs == ids, tokenizer_of(checkpoint).decode(theirs)
