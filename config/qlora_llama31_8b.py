# Llama 3.1 8B finetuned with QLoRA in 24 GiB: the frozen weights in four bits (NF4), with adapters of rank 16.
#   python data/fineweb_edu/prepare.py --tokenizer llama3          # or your own text
#   python train.py config/qlora_llama31_8b.py --init_from=Llama-3.1-8B --dataset=fineweb_edu
from lora_llama31_8b import *  # noqa: F403

out_dir = "out/qlora_llama31_8b"

# The frozen projections take 3.4 GiB instead of 13, embedding and head 2 GiB in bfloat16.
quantize_base = "nf4"

# 32,768 tokens per step. Full checkpointing stores one input per layer: all eight sequences fit. They pass through a
# block in two groups, so each projection is dequantized six times per step: twice in forward, four times in backward
# (down only twice there: its output is not recomputed).
batch_size = 8
block_size = 4096
gradient_accumulation_steps = 1
# Longer contexts, with the layers' saved activations in 31 to 35 GiB of CPU memory:
#   --batch_size=1 --block_size=32768 --activation_checkpointing=selective --offload_activations=true     11.2 GiB
#   --batch_size=1 --block_size=131072 --offload_activations=true                                         19.0 GiB
# --fp8=true (RTX 40, H100 or newer) multiplies the dequantized weights in float8: 30% faster, 18% at 32,768 tokens.
# With a few thousand tokens per step, the GPU waits for the CPU to launch kernels: add --cuda_graph=true.
