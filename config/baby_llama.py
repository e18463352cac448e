# A baby Llama that learns Python from Python's own standard library. It prepares the data by itself.
#   python train.py config/baby_llama.py                                      # two to four minutes on two CPU cores
#   python train.py config/baby_llama.py --batch_size=256                     # under a minute on an H200
#   python sample.py --out_dir=out/baby_llama --prompt="class Parser"
out_dir = "out/baby_llama"
dataset = "pystdlib"

# 1 million parameters: in those minutes two cores train it on 4.6 million bytes, a larger model on far fewer
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 128
ffn_dim = 384
tie_embeddings = True
rope_theta = 10000.0  # a context of 256 needs no slower rotations

cuda_graph = True  # on a GPU its step is hundreds of launches of a few microseconds each: replay them as one

batch_size = 8
block_size = 256
max_iters = 700
warmup_iters = 20
optimizer = "normuon"  # a CPU step takes a tenth longer than AdamW's, which at best ends 0.27 bits per byte higher
learning_rate = 4e-3  # small models take large steps
lr_schedule = "linear"
min_lr = 0.0

eval_interval = 350
eval_iters = 100  # all of the validation text, so that the loss is comparable with xz's
log_interval = 100
