"""Tasks and the procedure name each other: no task without a step in SKILL.md, no step that runs without a task."""

import importlib
import pkgutil
import re
from pathlib import Path

from prefect import Task

import perfladder.tasks
from perfladder.ladder import RUNGS
from perfladder.tasks.steps import rung_step, skill_task, step_of

ROOT = Path(__file__).parents[2]
SKILL = (ROOT / "SKILL.md").read_text()
COMMAND = re.compile(r"\bperfladder (run|tune|compare|capture|replay|ncu|sweep)\b")


def all_tasks() -> dict[str, Task]:
    found = {}
    for module in pkgutil.iter_modules(perfladder.tasks.__path__, "perfladder.tasks."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Task):
                found[f"{value.fn.__module__}.{name}"] = value
    return found


def sections() -> dict[str, str]:
    """The numbered steps of SKILL.md, each with its text."""
    parts = re.split(r"^## (\d+\. .+)$", SKILL, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rungs() -> set[str]:
    """The rungs that SKILL.md has a heading or an entry of its own for."""
    return {f"Rung {number}" for number in re.findall(r"^(?:### |- \*\*)Rung (\d+)\b", SKILL, flags=re.MULTILINE)}


def test_every_task_names_a_step_that_is_there() -> None:
    known, tasks = {*sections(), *rungs()}, all_tasks()
    assert len(tasks) >= 7
    assert {name: step_of(task) for name, task in tasks.items() if step_of(task) not in known} == {}


def test_a_task_is_made_in_no_other_way() -> None:
    bare = re.compile(r"^\s*@task\b|^from prefect import .*\btask\b", flags=re.MULTILINE)
    found = [path.name for path in (ROOT / "tasks").glob("*.py") if bare.search(path.read_text())]
    assert found == ["steps.py"]


def test_every_step_that_runs_something_has_its_task() -> None:
    named = {step_of(task) for task in all_tasks().values()}
    running = {title for title, text in sections().items() if COMMAND.search(text)}
    assert "3. Climb" in running
    assert running <= named


def test_every_rung_is_a_step_and_every_such_step_is_a_rung() -> None:
    assert {rung_step(rung.number) for rung in RUNGS} == rungs()


def test_the_description_begins_with_the_step() -> None:
    @skill_task("7. Report", name="tell")
    def tell(number: int) -> int:
        """Tell a number."""
        return number

    assert tell.description == "SKILL.md, 7. Report: Tell a number."
    assert tell.fn(4) == 4
    other = tell.with_options(name="other")
    assert (step_of(other), step_of(tell)) == ("7. Report", "7. Report")
