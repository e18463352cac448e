"""One idea a line: one assignment a statement, and no conditional expression inside another.

This prints the offences in all files, or in those that are named:

    python tests/test_style.py [FILE ...]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "config", "data", "docs", "kernels", "optimizers", "runtime", "tests")


def offences(path: Path) -> Iterator[str]:
    """Swaps, shapes, the unpacking of one value (`a, b = pair`) and one value for two names are one assignment."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            names = {ast.unparse(name) for name in getattr(node.targets[0], "elts", [])}
            values = {ast.unparse(value) for value in getattr(node.value, "elts", [])}
            if names and values and names != values:  # the same: a swap
                yield f"{path.relative_to(ROOT)}:{node.lineno}: several assignments: {ast.unparse(node)}"
        if isinstance(node, ast.IfExp) and any(isinstance(inner, ast.IfExp) for inner in list(ast.walk(node))[1:]):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: a nested conditional: {ast.unparse(node)}"


def all_files() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")) + sorted(ROOT.glob("*.py"))


def test_there_is_one_idea_a_line():
    assert [offence for path in all_files() for offence in offences(path)] == []


if __name__ == "__main__":
    for path in map(Path.resolve, map(Path, sys.argv[1:])) if sys.argv[1:] else all_files():
        for offence in offences(path):
            print(offence)
