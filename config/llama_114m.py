# A Llama of GPT-2's size: 114 million parameters, from scratch on 2.5 billion tokens of FineWeb-Edu.
#   pip install pyarrow huggingface_hub
#   python data/fineweb_edu/prepare.py --max_files 4    # downloads 8 GB, writes 6; GPT-2's tokenizer needs no license
#   python train.py config/llama_114m.py                # one GPU of 12 GB or more
#   python sample.py --out_dir=out/llama_114m --prompt="The moon"
out_dir = "out/llama_114m"
dataset = "fineweb_edu"

# Llama 3's shape at the width and depth of GPT-2
n_layer = 12
n_head = 12
n_kv_head = 4
n_embd = 768
ffn_dim = 2048
# gpt2's 50,257, rounded up to a multiple of 64: matmuls of odd widths are slower. Another tokenizer: --vocab_size=none
vocab_size = 50304
tie_embeddings = True
rope_theta = 10000.0  # a context of 1,024 needs no slower rotations

# 0.5M tokens per step: 16 x 1024 x 32
batch_size = 16
block_size = 1024
gradient_accumulation_steps = 32
max_iters = 4800  # 2.5B tokens, about 20 for each parameter (Hoffmann et al., 2022)
warmup_iters = 250
learning_rate = 6e-4  # GPT-3's for a model of 125 million parameters

eval_interval = 400
eval_iters = 100
