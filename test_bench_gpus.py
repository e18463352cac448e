"""The benchmark of several GPUs: its peers train on several ranks, what hangs is ended, its rows add up.

    pytest test_bench_gpus.py        half a minute, without a GPU

What needs GPUs, the measuring itself, is in the record that it leaves.
"""

import copy
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import bench
from benchmarks import gpus, plots, report, step

# ----------------------------------------------------------------------------------------------------------------------
# Peers on several ranks

# benchmarks/peers.py as it runs without GPUs: gloo, nothing compiled, the same weights for any number of ranks, and
# peaks of 2 GiB on rank 0, of 3 on rank 1.
PEER_ON_CPU = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from unittest import mock
import torch
from torch.distributed.tensor import distribute_tensor
from benchmarks import peers

materialize = peers.PlainLlama.materialize

@torch.no_grad()
def materialize_the_same(model, device):
    materialize(model, device)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    return model

cuda = {name: mock.Mock() for name in ("set_device", "reset_peak_memory_stats")}
cuda["max_memory_allocated"] = lambda: (2 + peers.RANK) * 2**30
cuda["get_device_name"] = lambda: "NVIDIA H200"
changed = {"own_device": lambda: torch.device("cpu")}
with (
    mock.patch.multiple(torch.cuda, **cuda),
    mock.patch.object(torch, "compile", lambda function, **_: function),
    mock.patch.object(peers, "own_device", lambda: torch.device("cpu")),
    mock.patch.object(peers.PlainLlama, "materialize", materialize_the_same),
):
    result = peers.main(json.loads(sys.argv[1]))
if peers.RANK == 0:
    print(json.dumps(result), flush=True)
peers.dist.barrier()
os._exit(0)  # gloo's threads now and then abort the interpreter that tidies up around them
""".replace('changed = {"own_device": lambda: torch.device("cpu")}\n', "")
TINY = {"config": "config/baby_llama.py", "n_layer": 2, "n_embd": 32, "ffn_dim": 96, "n_head": 4, "n_kv_head": 2,
        "vocab_size": 257, "block": 64, "steps": 30}  # fmt: skip


@pytest.mark.parametrize(
    "arm, checkpointing, tied", [("recipe", "none", True), ("recipe", "full", False), ("recipe-zero2", "none", False)]
)
def test_two_ranks_of_the_recipe_train_as_one_with_their_sequences(tmp_path, arm, checkpointing, tied):
    (tmp_path / "peer.py").write_text(PEER_ON_CPU)
    spec = TINY | {"arm": arm, "checkpointing": checkpointing, "tie_embeddings": tied}
    points = []
    for ranks in (1, 2):
        words = [str(tmp_path / "peer.py"), json.dumps(spec | {"batch": 8 // ranks})]
        point, printed = step.run(words, ranks)
        assert point is not None and "failed" not in point, printed
        points.append(point)
    one, two = points
    print(one, two)
    assert two["first_loss"] == pytest.approx(one["first_loss"], abs=1e-5), "the mean over both ranks"
