"""Without a GPU the tests run the kernels through Triton's interpreter: asked for before anything imports Triton."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: several threads only wait for each other
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
