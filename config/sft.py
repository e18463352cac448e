# Finetuning on conversations: only the assistant's answers are learned. FOLDER defines the model, any Llama; a step of
# Llama 3.2 1B takes 25 GiB.
#   python data/chat/prepare.py --input chats.jsonl --tokenizer FOLDER
#   python train.py config/sft.py --init_from=FOLDER
# Adapters instead of all weights: --lora_rank=16 --learning_rate=2e-4. Only the validation loss: --eval_only=true.
# With a few hundred million parameters, the GPU waits for the CPU to launch kernels: add --cuda_graph=true.
out_dir = "out/sft"
dataset = "chat"
mask_documents = True  # a block holds several conversations, each of which attends only to itself

# 65,536 tokens per step; the log's header says how many of them are targets. Conversations longer than block_size are
# cut off; the header counts them.
batch_size = 8
block_size = 2048
gradient_accumulation_steps = 4
activation_checkpointing = "selective"

# Less than a tenth of pretraining's learning rate, and no weight decay, which would pull published weights to zero. Two
# or three epochs are usual; the log's header says how many max_iters steps make. If the validation loss rises, the best
# checkpoint is the one before: the newest keep_last are kept.
learning_rate = 2e-5
min_lr = 0.0
warmup_iters = 20
max_iters = 500
weight_decay = 0.0
eval_interval = 50
eval_first = True  # the published weights' loss, for comparison
keep_last = 4
