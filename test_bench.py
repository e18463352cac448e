"""The README's numbers are those of the records, and the records say where they come from."""

import json
from pathlib import Path

import pytest

import bench

RECORDS = sorted((Path(bench.__file__).parent / "assets").glob("*.json"))


def test_the_readme_holds_what_the_records_say():
    readme = (bench.ROOT / "README.md").read_text()
    assert bench.render(readme) == readme, "run python bench.py readme"


def test_the_readme_shows_its_plots():
    for name in ("assets/baby_llama.png",):
        assert name in (bench.ROOT / "README.md").read_text() and (bench.ROOT / name).stat().st_size > 10_000


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_device_versions_and_commit(path):
    record = json.loads(path.read_text())
    assert record["command"].startswith("python ") and record["device"]
    assert {"nanocria", "python", "torch"} <= set(record["versions"])
    assert record["versions"]["nanocria"] != "unknown" and not record["versions"]["nanocria"].endswith("-dirty")


def test_a_missing_marker_is_named():
    with pytest.raises(ValueError, match="<!-- baby -->"):
        bench.render("<!-- headline --><!-- /headline -->")


def test_without_words_it_explains_itself():
    with pytest.raises(SystemExit, match="python bench.py readme"):
        bench.main([])
