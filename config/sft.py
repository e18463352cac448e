# Finetuning on conversations: only the assistant's answers are learned. The model is what FOLDER says, any Llama; of
# Llama 3.2 1B a step takes 25 GiB.
#   python data/chat/prepare.py --input chats.jsonl --tokenizer FOLDER
#   python train.py config/sft.py --init_from=FOLDER
# Adapters instead of all weights: --lora_rank=16 --learning_rate=2e-4. Only the validation loss: --eval_only=true.
# A model of some hundred million parameters takes the GPU less time than its CPU needs to launch it: --cuda_graph=true.
out_dir = "out/sft"
dataset = "chat"
mask_documents = True  # a block holds several conversations, each of which sees only itself

# 65,536 tokens a step, of which the log's header says how many are targets. What a conversation has beyond block_size
# is cut off: the header counts such ones.
batch_size = 8
block_size = 2048
gradient_accumulation_steps = 4
activation_checkpointing = "selective"

# Less than a tenth of pretraining's learning rate, and no weight decay, which would pull published weights to zero. Two
# or three times through the data are usual; the log's header says how often max_iters steps read them. Where the
# validation loss rises, the best checkpoint is the one before: the newest keep_last are kept.
learning_rate = 2e-5
min_lr = 0.0
warmup_iters = 20
max_iters = 500
weight_decay = 0.0
eval_interval = 50
eval_first = True  # the published weights' loss, to compare with
keep_last = 4
