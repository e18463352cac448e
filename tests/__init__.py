"""Without a GPU the tests run the kernels through Triton's interpreter: asked for before anything imports Triton."""

import os

import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
