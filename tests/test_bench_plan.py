"""benchmarks/plan.py against what was measured on one, two and four GPUs."""

import pytest

from benchmarks import plan
from benchmarks.settings import ROOT, load_record


def rows(record: str, kind: str) -> list[dict]:
    return [row for row in load_record(record)[kind] if row["trainer"] == "nanocria"]


@pytest.mark.parametrize("record", ["gpus", "gpus_two"])
def test_the_plan_gives_the_measured_steps_of_one_two_and_four_gpus(record):
    measured = {row["ranks"]: row["ms_per_step"] / 1000 for row in rows(record, "scaling")}
    assert len(measured) >= 2
    for n, seconds in measured.items():
        assert plan.seconds(plan.LLAMA_1B, n) == pytest.approx(seconds, rel=0.013), n
    of_8b = next(row for row in rows("gpus", "8b") if (row["batch"], row["block"]) == (2, 4096))
    assert plan.seconds(plan.LLAMA_8B, 4) == pytest.approx(of_8b["ms_per_step"] / 1000, rel=0.01)


def test_the_page_has_the_table_of_the_plan():
    """So every term is held: steps that wait for traffic within a machine, between machines, and for the update."""
    assert plan.plan_table() in (ROOT / "benchmarks/README.md").read_text()
