# Finetuning on conversations: only the assistant's answers are learned. FOLDER defines the model, any Llama; a step of
# Llama 3.2 1B takes 17 GiB.
#   python data/chat/prepare.py --input chats.jsonl --tokenizer FOLDER
#   python train.py config/sft.py --init_from=FOLDER
# Adapters instead of all weights: --lora_rank=16 --learning_rate=2e-4. Only the validation loss: --eval_only=true.
# With a few hundred million parameters, the GPU waits for the CPU to launch kernels: add --cuda_graph=true.
out_dir = "out/sft"
dataset = "chat"
mask_documents = True  # a block holds several conversations, each of which attends only to itself

# Small steps, so that a few hundred conversations make enough of them; with tens of thousands --batch_size=8 is faster.
# With very few, make the steps even smaller: 60 short conversations, 3,848 tokens in all, make 6 steps in three epochs,
# or 54 with --block_size=256.
# The log's header says how many tokens are targets. Conversations longer than block_size are cut off; it counts them.
batch_size = 1
block_size = 2048
gradient_accumulation_steps = 1
activation_checkpointing = "selective"

# Less than a tenth of pretraining's learning rate, and no weight decay, which would pull published weights to zero. If
# the validation loss rises before the end, the best checkpoint is still there: the log's last line names it.
learning_rate = 2e-5
min_lr = 0.0
warmup_iters = 5
epochs = 3
weight_decay = 0.0
eval_interval = 500  # or after each epoch, if that is shorter
keep_best = True
