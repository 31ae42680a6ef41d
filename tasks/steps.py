"""Which step of SKILL.md a task carries out: each task names one, so that the procedure and what runs do not part."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

P = ParamSpec("P")
R = TypeVar("R")

_ATTRIBUTE = "skill_step"


def skill_task(step: str, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function a Prefect task that carries out a step of SKILL.md.

    The task's description begins with the step, and each of its runs logs it. It is no tag: Prefect asks its server for
    every tagged task whether it may start.

    Args:
        step: A heading of SKILL.md, such as `7. Report`, or a rung, such as `Rung 1`.
        options: What `prefect.task` takes.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        @functools.wraps(function)
        def carry_out(*args: P.args, **kwargs: P.kwargs) -> R:
            # Called by `.fn`, there is no run that has a log.
            with suppress(MissingContextError):
                get_run_logger().info("SKILL.md, %s", step)
            return function(*args, **kwargs)

        setattr(carry_out, _ATTRIBUTE, step)
        description = f"SKILL.md, {step}: {inspect.getdoc(function) or ''}"
        made: Task[P, R] = task(**{"description": description, **options})(carry_out)
        return made

    return decorate


def step_of(made: Task[Any, Any]) -> str | None:
    """The step that a task names; None for one that names none."""
    found: str | None = getattr(made.fn, _ATTRIBUTE, None)
    return found


def rung_step(number: int) -> str:
    """The step of a rung, as `skill_task` takes it."""
    return f"Rung {number}"
