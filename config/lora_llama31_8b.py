# Llama 3.1 8B finetuned with LoRA in 24 GiB: the weights stay as published, adapters of rank 16 are trained.
#   python data/fineweb_edu/prepare.py --tokenizer llama3          # or your own text
#   python train.py config/lora_llama31_8b.py --init_from=Llama-3.1-8B --dataset=fineweb_edu
from llama31_8b import *  # noqa: F403

out_dir = "out/lora_llama31_8b"

# The frozen weights are 15 GiB. All seven projections are adapted: 42 million parameters, whose gradients, masters and
# moments take 0.6 GiB. They need ten times the learning rate of finetuning all weights.
lora_rank = 16
lora_alpha = 32
learning_rate = 2e-4
weight_decay = 0.0  # decay would pull the adapters to zero, so back to the published model
max_iters = 1000
warmup_iters = 30

# 32,768 tokens per step. Full checkpointing stores one input per layer: four sequences would fit. --fp8=true (RTX 40,
# H100 or newer) stores the frozen projections in 6.5 GiB instead of 13, and multiplies them in float8.
batch_size = 2
block_size = 4096
gradient_accumulation_steps = 4
activation_checkpointing = "full"

eval_interval = 100
eval_iters = 25
