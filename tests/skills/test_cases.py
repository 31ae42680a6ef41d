"""The worked cases: their pages are of the scripts beside them, and the scripts still have their faults."""

import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest

from perfladder.findings import Kind
from perfladder.ladder import climb
from perfladder.scripts.workload import script_workload

ROOT = Path(__file__).parents[2]
CASES = ROOT / "docs" / "cases"
SCRIPTS = sorted(CASES.glob("*.py"))


def page_of(script: Path) -> str:
    return (CASES / f"{script.stem.replace('_', '-')}.md").read_text()


@pytest.fixture(scope="module")
def steps():
    spec = importlib.util.spec_from_file_location("record_cases", ROOT / "tests" / "benchmarks" / "record_cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STEPS


def name(script):
    return script.stem


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_the_change_on_a_page_fits_the_script_and_what_is_recorded(script, steps):
    text, (diff,) = script.read_text(), re.findall(r"^```diff\n(.*?)^```$", page_of(script), re.MULTILINE | re.DOTALL)
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert removed
    assert [line for line in removed if line not in text.splitlines()] == []
    changed = text
    for before, after in (step for step in steps[script.stem] if isinstance(step, tuple)):
        assert changed.count(before) == 1
        changed = changed.replace(before, after)
    assert [line for line in added if line not in changed.splitlines()] == []
    compile(changed, str(script), "exec")


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_page_names_findings_that_there_are(script):
    kinds = re.findall(r'"kind": "(\w+)"', page_of(script))
    assert kinds
    assert set(kinds) <= set(get_args(Kind))


def test_the_index_has_every_case():
    index = (CASES / "README.md").read_text()
    assert [script.stem for script in SCRIPTS if f"]({script.stem.replace('_', '-')}.md)" not in index] == []


@pytest.mark.slow
def test_the_decoder_of_the_case_is_still_found_too_wide(tmp_path):
    changes = ["measured_runs=3", "warmup_runs=1", "device=cpu"]
    file = script_workload(str(CASES / "wide_decoder.py"), function="Codec.__call__", changes=changes)
    outcome = climb(file, runs_dir=tmp_path, until="stages", source="")
    (found,) = [finding for finding in outcome.findings if finding.kind == "wider_dtype"]
    workload = Path(outcome.run_dir) / "workload.yaml"
    assert found.next_command.startswith(f"perfladder tune {workload} --module decoder --backend eager:")
