"""One idea a line: one assignment a statement, and no conditional expression inside another.

python tests/test_style.py [FILE or FOLDER ...]     # prints the offences in these files, or in all
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLEAN = [  # files and folders without an offence
    "bench.py", "benchmarks", "config", "convert.py", "data", "kernels", "lora.py", "model.py", "optimizers",
    "plain_llama.py", "runtime/checkpoint.py", "runtime/copy_engines.py", "runtime/evaluate.py", "runtime/generate.py",
    "runtime/hf_config.py", "runtime/hf_names.py", "runtime/lm_eval.py", "runtime/memory.py",
    "runtime/memory_advice.py", "runtime/memory_stats.py", "runtime/resume.py", "runtime/save.py",
    "runtime/state_file.py", "runtime/stream_weights.py", "sample.py", "train.py",
]  # fmt: skip


def offences(path: Path) -> Iterator[str]:
    """Swaps, shapes and the unpacking of one value (`a, b = pair`, `a, b = f()`) are one assignment."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            pairs = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            if pairs:
                written = {ast.unparse(target) for target in node.targets[0].elts}
                pairs = written != {ast.unparse(value) for value in node.value.elts}  # not a swap
            if pairs or len(node.targets) > 1:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: several assignments: {ast.unparse(node)}"
        if isinstance(node, ast.IfExp) and any(isinstance(inner, ast.IfExp) for inner in list(ast.walk(node))[1:]):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: a nested conditional: {ast.unparse(node)}"


def files_in(places: list[str]) -> list[Path]:
    paths = [ROOT / place for place in places]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


@pytest.mark.parametrize("place", CLEAN)
def test_there_is_one_idea_a_line(place):
    assert [offence for path in files_in([place]) for offence in offences(path)] == []


if __name__ == "__main__":
    for path in files_in(sys.argv[1:] or ["."]):
        for offence in offences(path):
            print(offence)
