# Llama 3.2 1B: 1.24 billion parameters, from scratch on 10 billion tokens of FineWeb-Edu.
#   python data/fineweb_edu/prepare.py --tokenizer llama3
#   python train.py config/llama32_1b.py                                            # one GPU of 40 GB or more
#   torchrun --standalone --nproc_per_node=8 train.py config/llama32_1b.py          # eight
# Less memory: --batch_size=4 --gradient_accumulation_steps=64, then --activation_checkpointing=full.
out_dir = "out/llama32_1b"
dataset = "fineweb_edu"

# the published sizes
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
ffn_dim = 8192
vocab_size = 128256
tie_embeddings = True
rope_theta = 500000.0
rope_scaling = {  # for contexts beyond the 8,192 of pretraining; keeps weights from here and Meta's interchangeable
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# 0.5M tokens per step: 8 x 2048 x 32 (GPT-3 had 0.5M up to 760M parameters, 1M at 1.3B)
batch_size = 8
block_size = 2048
gradient_accumulation_steps = 32
max_iters = 19000  # 10B tokens, once
warmup_iters = 500
learning_rate = 4e-4

eval_interval = 500
eval_iters = 50
