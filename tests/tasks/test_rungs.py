"""The rung task's outcome, with no server."""

from types import SimpleNamespace
from typing import Any

import pytest

from perfladder.ladder import rung_named
from perfladder.rungs.base import RungResult
from perfladder.tasks.rungs import climb_rung_task, upload_task
from perfladder.tasks.store import StoreError

STAGES = rung_named("stages")


def ladder(**fields: Any) -> Any:
    return SimpleNamespace(climb_rung=lambda rung: RungResult(rung=rung.name, **fields), reused=set())


@pytest.mark.parametrize(
    ("status", "kind", "name"),
    [
        ("done", "COMPLETED", "Completed"),
        ("skipped", "COMPLETED", "Skipped"),
        ("not_applicable", "COMPLETED", "NotApplicable"),
        ("failed", "FAILED", "Failed"),
    ],
)
def test_a_rungs_status_becomes_the_task_runs_state(status: str, kind: str, name: str) -> None:
    state = climb_rung_task.fn(ladder(status=status, reason="why"), STAGES)
    assert (state.type.value, state.name) == (kind, name)
    assert state.message == ("why" if status != "done" else f"Rung 1 of SKILL.md: {STAGES.question}")


def test_a_result_that_was_taken_over_is_told_from_a_measured_one() -> None:
    resumed = ladder(status="done", started_at="2026-11-29T10:00:00+00:00")
    resumed.reused.add("stages")
    state = climb_rung_task.fn(resumed, STAGES)
    assert (state.type.value, state.name) == ("COMPLETED", "TakenOver")
    assert state.message == "As measured at 2026-11-29T10:00:00+00:00"


def test_a_store_with_a_problem_is_not_asked() -> None:
    state = upload_task.fn(SimpleNamespace(problem="it is down"), None, STAGES)
    assert (state.name, state.message) == ("NotUploaded", "it is down")


def test_files_that_did_not_arrive_fail_the_upload() -> None:
    store = SimpleNamespace(problem=None, log_rung=lambda run, rung: ["trace.json"], log_end=lambda run: [])
    assert upload_task.fn(store, None, STAGES).name == "Failed"
    assert upload_task.fn(store, None, None).name == "Completed"


def test_a_store_that_fails_raises_so_that_it_is_retried() -> None:
    def fail(*_: object) -> list[str]:
        raise StoreError("down")

    with pytest.raises(StoreError):
        upload_task.fn(SimpleNamespace(problem=None, log_rung=fail), None, STAGES)
    assert (climb_rung_task.retries, upload_task.retries) == (0, 1)
