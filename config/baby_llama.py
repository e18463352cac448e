# A baby Llama on the Python standard library, byte by byte: five minutes on two CPU cores, under one on a GPU.
# It prepares its data by itself, without a network.
#   python train.py config/baby_llama.py
out_dir = "out/baby_llama"
dataset = "pystdlib"

n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 128
ffn_dim = 384
tie_embeddings = True
rope_theta = 10000.0  # short contexts need no slower rotations

batch_size = 8
block_size = 256
learning_rate = 4e-3
max_iters = 300
warmup_iters = 50
eval_interval = 1000
eval_iters = 300
log_interval = 50
