"""Builds the C files of this folder for the CPU that they run on, and calls them."""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

C_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float"}


@functools.cache
def c_library(name: str) -> ctypes.CDLL:
    """The C file of that name, built by the compiler that Triton also needs. OSError if that fails."""
    installed = filter(shutil.which, ("cc", "gcc", "clang"))
    compiler = shlex.split(os.environ.get("CC", "")) or [next(installed, "no C compiler")]
    # No fused multiply-adds: PyTorch uses none, and compilers fuse different ones.
    flags = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            built = str(Path(folder, "built.so"))
            source = str(Path(__file__).with_name(name))
            subprocess.run([*compiler, *flags, source, "-o", built, "-lm"], capture_output=True, check=True)
            return ctypes.CDLL(built)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        raise OSError(f"kernels/{name} was not built, which --offload needs: {why}") from error


def update_in_c(name: str, parameter: torch.Tensor, grad: torch.Tensor, tensors: tuple, scalars: tuple) -> None:
    """Calls NAME.c's update of a parameter with all threads. tensors: its master w, the states, any tables."""
    if parameter.dtype == torch.float16:  # not every C compiler has it
        w = tensors[0]
        update_in_c(name, w, grad.float(), tensors, scalars)
        parameter.copy_(w)
        return
    function = getattr(c_library(f"{name}.c"), f"{name}_{C_NAMES[parameter.dtype]}_{C_NAMES[grad.dtype]}")
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (parameter, grad, *tensors))
    sizes = ctypes.c_int64(parameter.numel()), ctypes.c_int(torch.get_num_threads())
    function(*pointers, *sizes, *map(ctypes.c_float, scalars))
