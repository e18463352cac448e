"""The trainers that are compared, called arms: their titles, and how each is started.

Those with flags are train.py itself; the others are builders of benchmarks/peers.py. A record names its arms by the
keys here, so a key outlives the code that measured it.
"""

STEP = {
    "nanocria": "nanocria",
    "nanocria-fp8": "nanocria, fp8",
    "recipe": "torchtitan's recipe",
    "recipe-fp8": "torchtitan's recipe, fp8",
    "torchtitan": "torchtitan",
    "hf": "Hugging Face",
    "hf-compiled": "Hugging Face compiled",
    "hf-liger": "Hugging Face + Liger",
}
STEP_FLAGS = {"nanocria": [], "nanocria-fp8": ["--fp8=true"]}

GPUS = {
    "nanocria": "nanocria, ZeRO-3",
    "nanocria-zero2": "nanocria, ZeRO-2",
    "nanocria-hybrid": "nanocria, hybrid",
    "nanocria-nccl": "nanocria, ZeRO-3, NCCL alone",
    "nanocria-each": "nanocria, an independent run on each GPU",
    "recipe": "torchtitan's recipe, ZeRO-3",
    "recipe-zero2": "torchtitan's recipe, ZeRO-2",
    "torchtitan": "torchtitan, ZeRO-3",
}

SWEEP = {
    "all": "nanocria",
    "long": "nanocria, activations on the CPU",
    "kernels": "nanocria, unfused loss",
    "torch": "nanocria, plain PyTorch",
    "hf": "Hugging Face",
    "liger": "Hugging Face + Liger",
    "recipe": "torchtitan's recipe",
}
SWEEP_FLAGS = {
    "all": [],
    "long": ["--offload_activations=true"],
    "kernels": ["--fused_loss=false"],
    "torch": ["--fused_kernels=false", "--attention=sdpa", "--fused_loss=false"],
}
SWEEP_PEERS = {  # offload -> builder
    "hf": {"none": "hf-masters", "all": "hf-offload"},
    "liger": {"none": "hf-liger-masters", "all": "hf-liger-offload"},
    "recipe": {"none": "recipe"},
}

LOSSES = {
    "nanocria": "nanocria",
    "nanocria-fp8": "nanocria, fp8",
    "nanocria-plain": "nanocria, plain PyTorch",
    "hf": "Hugging Face, bfloat16",
    "float32": "Hugging Face, float32",
}
LOSSES_FLAGS = STEP_FLAGS | {"nanocria-plain": SWEEP_FLAGS["torch"]}

_HF, _LIGER = "'transformers>=5.17,<6'", "liger-kernel==0.8.5"  # the versions that peers.py knows
PIP = {
    "torchtitan": "'torchtitan<0.3'",
    "recipe-fp8": "'torchao>=0.17,<0.18'",
    "hf": _HF,
    "hf-compiled": _HF,
    "hf-liger": f"{_LIGER} {_HF}",
    "liger": f"{_LIGER} {_HF}",
}

# What snapshot.py tells apart in memory; the order of the table and of the plot.
SNAPSHOT_PARTS = ["weights", "optimizer", "gradients", "saved activations", "loss head", "temporary", "other"]
