"""How far a command is, on stderr: a bar or a spinner where someone is watching, lines where nobody is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perfladder.progress import Progress

Tell = Callable[[str], None]


class Lines(NamedTuple):
    """Shows one line; asks a question of yes or no, where someone is there to answer."""

    tell: Tell
    ask: Callable[[str], bool] | None


@contextmanager
def show_lines() -> Iterator[Lines]:
    """Progress lines, with a spinner where someone is watching."""
    from rich.console import Console
    from rich.prompt import Confirm
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    line = _with_time()
    if not console.is_terminal:
        yield Lines(lambda text: print(line(text), file=sys.stderr, flush=True), None)
        return
    with console.status("starting") as status:

        def tell(text: str) -> None:
            console.print(line(text), markup=False)
            status.update(text.partition(":")[0])

        def ask(question: str) -> bool:
            status.stop()
            try:
                return Confirm.ask(Text(question), console=console, default=False)
            finally:
                status.start()

        yield Lines(tell, ask if sys.stdin.isatty() else None)


@contextmanager
def show_bar(*, is_silent: bool) -> Iterator[tuple[Tell, Callable[[Progress], None]]]:
    """What is done, how many of how many, and about how long the rest takes.

    Args:
        is_silent: Show nothing.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if is_silent:
        yield lambda _: None, lambda _: None
    elif console.is_terminal:
        with _bar(console) as callbacks:
            yield callbacks
    else:
        line, last = _with_time(), ""

        def tell(text: str) -> None:
            print(line(text), file=sys.stderr, flush=True)

        def show(progress: Progress) -> None:
            nonlocal last
            if progress.label != last:
                last = progress.label
                tell(progress.label + _count(progress))

        yield tell, show


@contextmanager
def _bar(console: object) -> Iterator[tuple[Tell, Callable[[Progress], None]]]:
    from rich import progress as bars
    from rich.console import Console
    from rich.markup import escape

    assert isinstance(console, Console), "rich is imported inside functions only"
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.fields[count]}"),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, count="")

        def tell(text: str) -> None:
            bar.update(task, description=escape(text), total=None, count="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                description=escape(progress.label),
                total=progress.num_total or None,
                completed=progress.num_done,
                count=_count(progress),
            )

        yield tell, show


def _count(progress: Progress) -> str:
    if not progress.num_total:
        return ""
    left = "" if progress.remaining_s is None else f", about {_duration(progress.remaining_s)} left"
    return f" ({progress.num_done} of {progress.num_total}{left})"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _with_time() -> Callable[[str], str]:
    start = time.monotonic()
    return lambda text: f"{time.monotonic() - start:6.1f} s  {text}"
