"""The single owner of torch.profiler: starts it, stops it whatever happens, and exports the window exactly once."""

from __future__ import annotations

import gc
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from perfladder import _torch_private
from perfladder.errors import InputError, NotPossibleHereError, RungError, TraceError
from perfladder.trace.labels import GC_KIND, encode_label
from perfladder.trace.model import Trace
from perfladder.trace.warnings import TraceWarning, WarningCode

_SOURCE: Final = "trace.record"
# An export without any event is a header of about 2 kB; only such a small file is read back to see whether it is empty.
_SMALL_FILE_BYTES: Final = 1 << 16

has_profiled_before: bool = False
"""Whether this process has recorded a window. It stays slower after that, so it is not to be timed any more."""


@dataclass
class Window:
    """One profiled window; the file is there once the `with` block of `record_window` has ended.

    Attributes:
        trace_path: Where the trace is.
        activities: What was recorded, e.g. `("cpu", "cuda")`.
        is_first: Whether this process had recorded no window before.
        stop_s: How long the profiler took to stop; None before it.
        export_s: How long the export took; None before it.
        trace_bytes: Size of the file; None before the export.
    """

    trace_path: Path
    activities: tuple[str, ...]
    is_first: bool
    stop_s: float | None = None
    export_s: float | None = None
    trace_bytes: int | None = None

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that marks a span, e.g. `window.span("profiled_run", "0")`."""
        return span(kind, name)

    def read(self, *, with_arguments: bool = False) -> Trace:
        """Read the trace; a device that was asked for and did nothing is named in its warnings."""
        trace = Trace.read(self.trace_path, with_arguments=with_arguments)
        devices = [activity for activity in self.activities if activity != "cpu"]
        if not devices or trace.has_device_work:
            return trace
        message = f"Activity {devices[0]!r} was recorded, but the window holds no kernel, copy or fill."
        warning = TraceWarning(code=WarningCode.NO_DEVICE_EVENTS, message=message, source=_SOURCE)
        return replace(trace, warnings=(*trace.warnings, warning))


def span(kind: str, name: str) -> AbstractContextManager[Any]:
    """Return a context manager that marks a span of ours in whichever window is open; it costs little in none."""
    return _torch_private.open_span(encode_label(kind, name))


def open_span(label: str) -> Callable[[], None]:
    """Open a span by its encoded label and return what closes it, for hooks that see a call's two ends apart.

    A span that is never closed gets an ordinary duration when the profiler stops: the trace cannot tell, so whoever
    opens spans this way keeps count of them.
    """
    opened = _torch_private.open_span(label)
    opened.__enter__()

    def close() -> None:
        opened.__exit__(None, None, None)

    return close


def find_activities() -> tuple[str, ...]:
    """Return what can be recorded here: `cpu`, and the accelerator's type if there is one that torch can profile."""
    supported = {activity.name.lower() for activity in torch.profiler.supported_activities()}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return ("cpu",)
    name = _activity_of(accelerator.type)
    return ("cpu", name) if name in supported else ("cpu",)


def _activity_of(device_type: str) -> str:
    """Return the profiler's name for a device type; one that a plug-in brings is PrivateUse1, whatever it is called."""
    return "privateuse1" if device_type == _torch_private.name_plugin_device() else device_type


@contextmanager
def record_window(
    trace_path: str | Path,
    *,
    activities: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    with_shapes: bool = False,
    with_stack: bool = False,
    all_threads: bool = False,
    mark_garbage_collection: bool = False,
    export_timeout_s: float = 300.0,
) -> Iterator[Window]:
    """Record the `with` block with torch.profiler and write its trace, once and atomically, when the block ends.

    If the block raises, the profiler is stopped, what was recorded is written, and the error goes on.

    Args:
        trace_path: File to write, `.json` or `.json.gz`; replaced if it exists. Its folder must exist.
        activities: `cpu` and device types such as `cuda` or `xpu`; None records what `device` says.
        device: Device that the work runs on, e.g. `cuda:0`; None records all that is there.
        with_shapes: Record input shapes; costs time in each operator.
        with_stack: Record Python stacks; several times slower, and known to crash in some versions.
        all_threads: Record operators of all threads, not only those of this one and of its backward passes.
        mark_garbage_collection: Mark each pass of Python's garbage collector as a span.
        export_timeout_s: How long writing the trace may take.

    Raises:
        InputError: The file cannot be written there.
        NotPossibleHereError: An activity that was asked for cannot be recorded here.
        RungError: Another profiler is active, or took over during the block, or the window holds no event, or writing
            it took too long.
    """
    global has_profiled_before
    path = Path(trace_path).absolute()
    chosen = _choose_activities(activities, device)
    if _torch_private.is_profiler_active():
        raise RungError(
            "Cannot record a window: another torch profiler is active in this process, and starting a second one would "
            "silently end it. Stop that one first."
        )
    temporary = _make_temporary(path)
    window = Window(trace_path=path, activities=chosen, is_first=not has_profiled_before)
    export = partial(_stop_and_export, window=window, temporary=temporary, timeout_s=export_timeout_s)
    try:
        profiler = _make_profiler(chosen, with_shapes=with_shapes, with_stack=with_stack, all_threads=all_threads)
        _synchronize(chosen)  # the device's lazy start must not be charged to the window
        has_profiled_before = True
        _start(profiler)
        with _stopped(partial(export, profiler)), _garbage_collection_marks(mark_garbage_collection):
            yield window
            _synchronize(chosen)
    finally:
        temporary.unlink(missing_ok=True)


def _start(profiler: torch.profiler.profile) -> None:
    with warnings.catch_warnings():
        # torch 2.11 tells everyone that events are kept for one cycle only, which is what is wanted; `acc_events=True`
        # would silence it and parse all events at the stop, for seconds.
        warnings.filterwarnings("ignore", message=r"(?s).*acc_events", category=UserWarning)
        profiler.start()


@contextmanager
def _stopped(export: Callable[[], None]) -> Iterator[None]:
    """Stop and export when the block ends. An error of the block wins over one of the export."""
    try:
        yield
    except BaseException:
        with suppress(RungError):
            export()
        raise
    export()


def _stop_and_export(profiler: torch.profiler.profile, window: Window, temporary: Path, timeout_s: float) -> None:
    if not _torch_private.is_profiler_active():
        # Exporting a session that a second profiler has ended crashes the process (segmentation fault, torch 2.13).
        raise RungError(
            "The window is lost: something in it started and stopped a torch profiler of its own, which ends this one. "
            "Switch that profiler off."
        )
    begin = perf_counter()
    profiler.stop()
    window.stop_s = perf_counter() - begin
    _export(profiler, window, temporary, timeout_s)
    window.trace_bytes = temporary.stat().st_size
    if window.trace_bytes < _SMALL_FILE_BYTES:
        _check_not_empty(temporary)
    os.replace(temporary, window.trace_path)


def _export(profiler: torch.profiler.profile, window: Window, temporary: Path, timeout_s: float) -> None:
    """Write the trace in a thread of its own, so that waiting for it can end."""
    failures: list[Exception] = []

    def write() -> None:
        try:
            profiler.export_chrome_trace(str(temporary))
        except (OSError, RuntimeError) as error:
            failures.append(error)

    begin = perf_counter()
    writer = threading.Thread(target=write, name="perfladder-export", daemon=True)
    writer.start()
    writer.join(timeout_s)
    window.export_s = perf_counter() - begin
    if writer.is_alive():
        raise RungError(
            f"Trace export timed out after {timeout_s:g} s, with {temporary.stat().st_size / 1e6:,.0f} MB written. "
            "Profile fewer runs, or a smaller input."
        )
    if failures:
        raise RungError(
            f"Writing the trace {window.trace_path} failed: {failures[0]}. Check the space on the disk."
        ) from failures[0]


def _check_not_empty(path: Path) -> None:
    try:
        Trace.read(path)
    except TraceError as error:
        raise RungError(
            "The window holds no event: nothing that torch records ran in it, or another profiler took over. Operators "
            "of other threads need all_threads=True."
        ) from error


def _choose_activities(activities: Sequence[str] | None, device: str | torch.device | None) -> tuple[str, ...]:
    here = find_activities()
    if activities is None and device is not None:
        activities = ("cpu", _activity_of(torch.device(device).type))
    if activities is None:
        return here
    chosen = tuple(dict.fromkeys(activity.lower() for activity in activities))
    missing = [activity for activity in chosen if activity not in here]
    if missing:
        raise NotPossibleHereError(
            f"Cannot record activity {missing[0]!r}: this torch ({torch.__version__}) on this machine records "
            f"{', '.join(here)}. Leave it out, or run where that device is."
        )
    return chosen


def _make_profiler(
    activities: tuple[str, ...], *, with_shapes: bool, with_stack: bool, all_threads: bool
) -> torch.profiler.profile:
    by_name = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    try:
        config = _torch_private.make_profiler_config(all_threads=all_threads, trace_only=not with_stack)
    except AttributeError as error:
        raise NotPossibleHereError(f"all_threads=True: {error}. Use a newer torch or leave it out.") from error
    return torch.profiler.profile(
        activities=[by_name[activity] for activity in activities],
        record_shapes=with_shapes,
        with_stack=with_stack,
        experimental_config=config,
    )


def _make_temporary(path: Path) -> Path:
    """Make the temporary file now, so that an unwritable folder is found before anything is measured."""
    suffix = ".json.gz" if path.suffix == ".gz" else ".json"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")
    try:
        temporary.touch(exist_ok=False)  # with the user's own permissions, which a file of `tempfile` would not have
    except OSError as error:
        raise InputError(
            f"Cannot write the trace {path}: {error.strerror}. Name a file in a writable folder."
        ) from error
    return temporary


def _synchronize(activities: tuple[str, ...]) -> None:
    if any(activity != "cpu" for activity in activities):
        torch.accelerator.synchronize()


@contextmanager
def _garbage_collection_marks(is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    open_marks: list[AbstractContextManager[Any]] = []

    def mark(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            open_marks.append(span(GC_KIND, str(info.get("generation", ""))))
            open_marks[-1].__enter__()
        elif open_marks:
            open_marks.pop().__exit__(None, None, None)

    gc.callbacks.append(mark)
    try:
        yield
    finally:
        gc.callbacks.remove(mark)
