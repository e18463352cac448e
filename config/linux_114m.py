# A Llama of GPT-2's size on the source of the Linux kernel: 1.3 GB of C and documentation, 702 million tokens.
#   curl -O https://cdn.kernel.org/pub/linux/kernel/v6.x/linux-6.1.192.tar.xz && tar -xf linux-6.1.192.tar.xz
#   python data/text/prepare.py --input linux-6.1.192 --format text --errors skip --tokenizer gpt2 --out data/linux
#   python train.py config/linux_114m.py                                        # one H100 or H200
#   python train.py config/linux_114m.py --optimizer=soapmuon --learning_rate=0.0024 --max_iters=552 --warmup_iters=20 \
#     --out_dir=out/linux_114m_soapmuon                                         # a lower loss from 65% of the tokens
#   python sample.py --out_dir=out/linux_114m --prompt="static int __init"
from llama_114m import *  # noqa: F403

out_dir = "out/linux_114m"
dataset = "linux"

# 0.5M tokens per step: 64 x 1024 x 8. A smaller card: half batch_size, double gradient_accumulation_steps
batch_size = 64
gradient_accumulation_steps = 8
max_iters = 850  # 446M tokens of 702M: 13 minutes of an H100
warmup_iters = 100
learning_rate = 1.2e-3
lr_schedule = "wsd"  # so that the run can be extended from a checkpoint before the cooldown
cooldown_iters = 300
min_lr = 0.0

eval_interval = 100
eval_iters = 100  # all of the validation files
keep_last = 5  # reaches back to before the cooldown
