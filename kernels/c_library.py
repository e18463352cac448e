"""Builds the C files of this folder for the CPU that they run on."""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

not_used = set()  # files that some rank could not build: all ranks must round alike


def c_library(name: str) -> ctypes.CDLL | None:
    """The C file of that name, built by the compiler that Triton also needs; None if that fails on any rank."""
    return None if name in not_used else build(name)


@functools.cache
def build(name: str) -> ctypes.CDLL | None:
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
        print(f"PyTorch does its work on the CPU, slower: kernels/{name} was not built ({why})", file=sys.stderr)
        return None
