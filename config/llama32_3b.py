# Llama 3.2 3B: 3.21 billion parameters, from scratch on 10 billion tokens of FineWeb-Edu.
#   python data/fineweb_edu/prepare.py --tokenizer llama3
#   torchrun --standalone --nproc_per_node=4 train.py config/llama32_3b.py          # four GPUs of 40 GB or more
#   python train.py config/llama32_3b.py                                            # one of 80 GB or more
out_dir = "out/llama32_3b"
dataset = "fineweb_edu"

# the published sizes
n_layer = 28
n_head = 24
n_kv_head = 8
n_embd = 3072
ffn_dim = 8192
vocab_size = 128256
tie_embeddings = True
rope_theta = 500000.0
rope_scaling = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# 0.5M tokens per step: 4 x 4096 x 32
batch_size = 4
block_size = 4096
gradient_accumulation_steps = 32
max_iters = 19000  # 10B tokens, once
warmup_iters = 500
learning_rate = 3e-4
activation_checkpointing = "selective"

eval_interval = 500
eval_iters = 50
