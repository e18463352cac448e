"""The trainers under comparison, called arms: their titles by their key in records, and how to start each.

Arms with flags are train.py itself; the others are builders in benchmarks/peers.py.
"""

from typing import NamedTuple

STEP = {
    "nanocria": "nanocria", "nanocria-fp8": "nanocria, fp8", "recipe": "torchtitan's recipe",
    "recipe-fp8": "torchtitan's recipe, fp8", "torchtitan": "torchtitan", "hf": "Hugging Face",
    "hf-compiled": "Hugging Face compiled", "hf-graphs": "Hugging Face compiled, CUDA graphs",
    "hf-liger": "Hugging Face + Liger",
}  # fmt: skip
GPUS = {  # hybrid and each occur in older records
    "nanocria": "nanocria, ZeRO-3", "nanocria-zero2": "nanocria, ZeRO-2", "nanocria-hybrid": "nanocria, hybrid",
    "nanocria-nccl": "nanocria, ZeRO-3, NCCL alone", "nanocria-each": "nanocria, an independent run on each GPU",
    "recipe": "torchtitan's recipe, ZeRO-3", "recipe-zero2": "torchtitan's recipe, ZeRO-2",
    "torchtitan": "torchtitan, ZeRO-3", "nanocria-adamw": "nanocria, AdamW", "nanocria-muon": "nanocria, Muon",
    "nanocria-normuon": "nanocria, NorMuon",
}  # fmt: skip
SWEEP = {
    "all": "nanocria", "long": "nanocria, activations on the CPU", "kernels": "nanocria, unfused loss",
    "torch": "nanocria, plain PyTorch", "hf": "Hugging Face", "liger": "Hugging Face + Liger",
    "recipe": "torchtitan's recipe", "lora": "nanocria, LoRA", "lora-fp8": "nanocria, LoRA, float8",
    "qlora": "nanocria, QLoRA", "qlora-fp8": "nanocria, QLoRA, float8",
    "peft": "Hugging Face + Liger + peft, LoRA", "peft-qlora": "Hugging Face + Liger + peft, QLoRA",
    "liger-8bit": "Hugging Face + Liger + bitsandbytes, 8-bit AdamW",
    "liger-galore": "Hugging Face + Liger + galore-torch, GaLore and 8-bit AdamW",
}  # fmt: skip
LOSSES = {
    "nanocria": "nanocria", "nanocria-fp8": "nanocria, fp8", "nanocria-plain": "nanocria, plain PyTorch",
    "hf": "Hugging Face, bfloat16", "float32": "Hugging Face, float32", "nanocria-galore": "nanocria, GaLore",
    "hf-galore": "Hugging Face, float32 + galore-torch, GaLore",
}  # fmt: skip
FINETUNE = {
    "nanocria": "nanocria, bfloat16", "hf": "transformers, bfloat16", "hf-again": "transformers, bfloat16, again",
    "nanocria-float32": "nanocria, float32", "hf-float32": "transformers, float32",
    "nanocria-lora": "nanocria, LoRA", "nanocria-lora-fp8": "nanocria, LoRA, float8",
    "nanocria-qlora": "nanocria, QLoRA", "nanocria-qlora-fp8": "nanocria, QLoRA, float8",
    "hf-lora": "transformers + peft, LoRA", "hf-lora-again": "transformers + peft, LoRA, again",
}  # fmt: skip
GENERATE = {
    "nanocria": "nanocria", "hf": "transformers.generate, default cache",
    "hf-static": "transformers.generate, static cache, compiled",
}  # fmt: skip

STEP_FLAGS = {"nanocria": [], "nanocria-fp8": ["--fp8=true"]}
SWEEP_FLAGS = {
    "all": [],
    "long": ["--offload_activations=true"],
    "kernels": ["--kernels=blocks"],
    "torch": ["--kernels=none", "--attention=sdpa"],
    "lora": ["--lora_rank=16"],
    "lora-fp8": ["--lora_rank=16", "--fp8=true"],
    "qlora": ["--lora_rank=16", "--base_dtype=nf4"],
    "qlora-fp8": ["--lora_rank=16", "--base_dtype=nf4", "--fp8=true"],
}
LOSSES_FLAGS = STEP_FLAGS | {"nanocria-plain": SWEEP_FLAGS["torch"], "nanocria-galore": ["--optimizer=galore"]}
SWEEP_PEERS = {  # offload -> builder
    "hf": {"none": "hf-masters", "all": "hf-offload"},
    "liger": {"none": "hf-liger-masters", "all": "hf-liger-offload"},
    "recipe": {"none": "recipe"},
    "peft": {"none": "hf-liger-lora"},
    "peft-qlora": {"none": "hf-liger-qlora"},
    "liger-8bit": {"none": "hf-liger-8bit"},
    "liger-galore": {"none": "hf-liger-galore"},
}

LIGER = {"hf-liger", "liger", "liger-8bit", "liger-galore", "peft", "peft-qlora"}
HF = {"hf", "hf-again", "hf-float32", "hf-compiled", "hf-graphs", "hf-static", "hf-galore", "float32"}
HF_LORA = {"hf-lora", "hf-lora-again"}
PACKAGES = {  # -> the versions that peers.py supports, and the arms that use it; peers.py itself contains the recipe
    "transformers": (">=5.17,<6", HF | HF_LORA | LIGER),
    "liger_kernel": ("==0.8.5", LIGER),
    "cut-cross-entropy": ("==25.1.1", {"cce"}),
    "torchtitan": ("<0.3", {"torchtitan"}),
    "torchao": (">=0.17,<0.18", {"recipe-fp8"}),
    "peft": (">=0.21,<0.22", HF_LORA | {"peft", "peft-qlora"}),
    "bitsandbytes": (">=0.50,<0.51", {"bitsandbytes", "liger-8bit", "liger-galore", "peft-qlora"}),
    "galore-torch": ("==1.0", {"liger-galore", "hf-galore"}),
}

SHOWN = ("all", "long", "liger", "hf")  # the arms of a sweep that README.md shows
# The parts of memory that snapshot.py distinguishes, in the order of the table and the plot.
SNAPSHOT_PARTS = ["weights", "optimizer", "gradients", "saved activations", "loss head", "temporary", "other"]


def packages_of(ran: set[str]) -> dict[str, str]:
    """The packages that these arms run, and their versions."""
    return {package: versions for package, (versions, arms) in PACKAGES.items() if arms & ran}


class Rung(NamedTuple):
    title: str
    on: str  # the rung that it builds on; for a peer, the rung that it is compared with
    flags: dict
    peer: str = ""  # the arm that runs it, if not nanocria


RUNGS = {
    "plain": Rung("plain PyTorch, float32", "", {"dtype": "float32", "kernels": "none", "attention": "sdpa",
                                                 "activation_checkpointing": "none"}),
    "kernels": Rung("fused kernels", "plain", {"kernels": "blocks", "attention": "auto"}),
    "loss": Rung("fused loss", "kernels", {"kernels": "all"}),
    "checkpointing": Rung("full checkpointing", "loss", {"activation_checkpointing": "full"}),
    "bf16": Rung("bfloat16 compute", "checkpointing", {"dtype": "bfloat16"}),
    "adamw8bit": Rung("8-bit AdamW", "bf16", {"optimizer_bits": "8"}),
    "galore": Rung("GaLore, rank 128, its moments in float32", "adamw8bit",  # 8 bits need a multiple of 256
                   {"optimizer": "galore", "galore_rank": "128"}),
    "offload_optimizer": Rung("optimizer in CPU memory", "adamw8bit", {"offload": "optimizer"}),
    "offload_all": Rung("weights in CPU memory too", "offload_optimizer", {"offload": "all"}),
    "offload_activations": Rung("activations in CPU memory too", "offload_all", {"offload_activations": "true"}),
    "nvme": Rung("optimizer on the NVMe drive", "offload_activations", {}),  # offload_dir
    "lora": Rung("LoRA of rank 16", "bf16", {"lora_rank": "16", "lora_alpha": "32"}),
    "lora_fp8": Rung("LoRA with the base in float8", "lora", {"fp8": "true"}),
    "qlora": Rung("QLoRA: the base in NF4", "lora", {"base_dtype": "nf4"}),
    "qlora_fp8": Rung("QLoRA, multiplied in float8", "qlora", {"fp8": "true"}),
    **{f"hf_{on}": Rung(SWEEP[peer], on, {}, peer) for on, peer in {
        "adamw8bit": "liger-8bit", "galore": "liger-galore", "lora": "peft", "qlora": "peft-qlora"}.items()},
}  # fmt: skip
