"""Without a GPU the tests run the kernels in Triton's interpreter, which is set before anything imports Triton."""

import contextlib
import gc
import os
from types import SimpleNamespace

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that they start; conftest.py sets this one's
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


def keep_patches(interpreter):
    """The interpreter patches triton.language again for each launch and each call of a helper: two fifths of its time
    on small tensors. Here it patches once for each module of kernels, and restores nothing.
    """
    patch = interpreter._patch_lang
    patched = set()

    def patch_once(fn):
        gc.collect(1)  # a launch is a cycle that holds its arguments; the patches made so many objects that it went
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


if os.environ["TRITON_INTERPRET"] == "1":
    with contextlib.suppress(ImportError, AttributeError):  # no Triton, or another version: then it stays slow
        from triton.runtime import interpreter

        keep_patches(interpreter)
