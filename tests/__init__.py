"""Without a GPU the tests run the kernels through Triton's interpreter: asked for before anything imports Triton."""

import contextlib
import gc
import os
from types import SimpleNamespace

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that they start; conftest.py sets this one's
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


def keep_patches(interpreter):
    """The interpreter patches triton.language anew for each launch and each call of a helper, two fifths of its time on
    small tensors: here once for each module of kernels, and for good.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        gc.collect(1)  # a launch is a cycle that holds its arguments; the patches made so many objects that it went
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


if os.environ["TRITON_INTERPRET"] == "1":
    with contextlib.suppress(ImportError, AttributeError):  # no Triton; another version, as slow as it is
        from triton.runtime import interpreter

        keep_patches(interpreter)
