"""llama.cpp reads checkpoints as they are. LLAMA_CPP: a folder of its sources with npm's node-llama-cpp (.ci/run)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from convert import convert
from data.chat.prepare import prepare
from data.chat.template import encode_prompt
from data.tokenizer import tokenizer_of
from runtime.checkpoint import load_model
from tests.published import smollm2

LLAMA_CPP = os.environ.get("LLAMA_CPP")
DRAW = """
const [folder, modelPath, text, n] = process.argv.slice(2)
const {getLlama} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`)
const llama = await getLlama({gpu: false, maxThreads: 1, build: "never", logLevel: "error"})
const model = await llama.loadModel({modelPath})
const context = await model.createContext({contextSize: 64})
const ids = model.tokenize(text, true) // <|im_start|> is one token
for await (const id of context.getSequence().evaluate([...ids], {temperature: 0}))
    if (ids.push(id) == +n) break
console.log(JSON.stringify(ids))
process.exit(0)
"""


@pytest.mark.real
@pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP names no folder")
@pytest.mark.parametrize("kind, text, n", [
    ("bytes", "and the 🦙 is", 32), ("QLoRA", "What is a cria?", 60),
])  # fmt: skip
def test_llama_cpp_has_our_ids_and_our_greedy_tokens(train, tmp_path, plain_pytorch_on_one_core, kind, text, n):
    """QLoRA: from conversations to merged weights, as the README tells it."""
    published = tmp_path / "hf"
    if kind != "bytes":
        smollm2(published, weights=True)
    small = dict(init_from=published, dataset=tmp_path / "data", device="cpu", block_size=32, batch_size=1)
    small |= dict(gradient_accumulation_steps=1, max_iters=2, eval_iters=1)
    if kind == "bytes":
        train(max_iters=200, eval_interval=200)
    else:
        rows = [{"prompt": f"What is llama number {i}?", "completion": f"Number {i} is a cria."} for i in range(30)]
        (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
        prepare([tmp_path / "chats.jsonl"], tmp_path / "data", str(published))
        qlora = dict(lora_rank=4, quantize_base="nf4", learning_rate=2e-3, warmup_iters=1)
        train("config/sft.py", **small | qlora | dict(block_size=128, max_iters=6))
    (checkpoint,) = (tmp_path / "out").glob("step_*")
    tokenizer = tokenizer_of(checkpoint)
    ids = tokenizer.encode(text)
    if kind == "QLoRA":
        ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
        text = tokenizer.decode(ids)
    model = load_model(checkpoint)
    with torch.no_grad():
        while len(ids) < n and (token := model(torch.tensor([ids]))[0, -1].argmax().item()) not in tokenizer.eos:
            ids.append(token)
    if kind == "QLoRA":
        convert(checkpoint, tmp_path / "merged", "float32")
        checkpoint = tmp_path / "merged"
    gguf = tmp_path / "model.gguf"
    script = f"{LLAMA_CPP}/convert_hf_to_gguf.py"
    subprocess.run([sys.executable, script, checkpoint, "--outtype=f32", f"--outfile={gguf}"], check=True)
    (tmp_path / "draw.mjs").write_text(DRAW)
    command = ["node", tmp_path / "draw.mjs", LLAMA_CPP, gguf, text, str(n)]
    theirs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert theirs == ids, tokenizer.decode(theirs)
