# Llama 3.1 8B: 8.03 billion parameters, from scratch on 10 billion tokens of FineWeb-Edu.
#   python data/fineweb_edu/prepare.py --tokenizer llama3
#   torchrun --standalone --nproc_per_node=8 train.py config/llama31_8b.py          # eight GPUs of 40 GB or more
# Weights, gradient accumulators and optimizer state are 128 GB in all, sharded over the GPUs.
out_dir = "out/llama31_8b"
dataset = "fineweb_edu"

# the published sizes
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
ffn_dim = 14336
vocab_size = 128256
tie_embeddings = False
rope_theta = 500000.0
rope_scaling = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# 0.5M tokens per step: 2 x 4096 x 64. Meta began 405B with 4M and a context of 4,096, then doubled both.
batch_size = 2
block_size = 4096
gradient_accumulation_steps = 64
max_iters = 19000  # 10B tokens, once
warmup_iters = 500
learning_rate = 3e-4
activation_checkpointing = "full"

eval_interval = 500
eval_iters = 50
