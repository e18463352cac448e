#!/bin/bash
# sbatch config/slurm.sh config/llama31_8b.py --sharding=hybrid
# One torchrun a node. Five minutes before the time limit the run saves, and the job queues again, to resume.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

export HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 10000))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds to save in; 30 with PyTorch 2.11 and 2.12, which do not read this
# is_host: by default torchrun compares names, which fails where a machine calls itself 127.0.1.1, as Debian does.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
    --rdzv_backend=c10d --rdzv_endpoint="$HOST:$PORT" --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_conf="is_host=$((SLURM_NODEID == 0))" --max-restarts=3 \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 train.py "$@"' torchrun "$@" &
trap 'kill -USR1 $!; wait $!; scontrol requeue "$SLURM_JOB_ID"' USR1
wait $!
