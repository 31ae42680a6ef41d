"""Find the modules of a program as they are called, and have them tuned: the one patch that holds for a process.

While the finder is on, `torch.nn.Module.__call__` is a function of this module. A module that it takes up gets another
class, made of its own one, so that the object stays what the program holds; all of it is put back by `pause`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn

from perfladder._torch_private import is_tracing
from perfladder.jit.config import jit_config
from perfladder.jit.control import JitControl, jit_class, plain_twin
from perfladder.jit.entry import Entry, children_of, entry_of, is_transparent, name_below, why_left_alone
from perfladder.jit.report import JitReport
from perfladder.jit.tuner import Outcome, Tuner
from perfladder.timing.timer import Clock

_logger = logging.getLogger("perfladder.jit")

_MAX_GONE: Final = 1000
"""Entries of modules that are no more which are kept for the report."""


class _Place(threading.local):
    """Where this thread is: the module whose children are looked at, and whether any are."""

    parent: Entry | None = None
    is_closed: bool = False


class Finder:
    """What is known of the modules of this process.

    Args:
        clock: Nanoseconds, for inspection.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.tuner = Tuner(clock)
        self._clock = clock
        self._live: dict[int, Entry] = {}
        self._all: list[Entry] = []
        self._lock = threading.RLock()
        self._place = _Place()
        self._is_on = False
        self._num_blocks = 0
        self._in_block: ContextVar[bool] = ContextVar("perfladder_jit", default=False)
        self._plain_call: Callable[..., Any] | None = None
        self._patch: Callable[..., Any] | None = None
        self._is_patched = False

    def enable(self) -> None:
        """Look at the calls of all threads from now on."""
        with self._lock:
            self._is_on = True
            self._resume()

    def disable(self) -> None:
        """Put everything back as it was; what was chosen is taken up again by the next `enable`."""
        with self._lock:
            self._is_on = False
            if not self._num_blocks:
                self._pause()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Look at the calls of this context, inside the block."""
        with self._lock:
            self._num_blocks += 1
            self._resume()
        token = self._in_block.set(True)
        try:
            yield
        finally:
            self._in_block.reset(token)
            with self._lock:
                self._num_blocks -= 1
                if not self._num_blocks and not self._is_on:
                    self._pause()

    def forget(self) -> None:
        """Know nothing any more; modules are plain again."""
        with self._lock:
            for entry in list(self._live.values()):
                entry.put_back()
            self._live.clear()
            self._all.clear()
            self.tuner.is_armed = False

    def report(self) -> JitReport:
        """What was found, outer modules before those in them."""
        with self._lock:
            entries = list(self._all)
        roots = [entry for entry in entries if entry.parent is None]
        ordered = [entry for root in roots for entry in _with_children(root, entries)]
        return JitReport(
            mode=jit_config.mode,
            cache_dir=str(jit_config.cache_dir),
            modules=[entry.report() for entry in ordered],
        )

    def _resume(self) -> None:
        if not self._is_patched:
            if self._patch is None or nn.Module.__call__ is not self._plain_call:
                # Made once: compiled code is guarded by the function that it saw, and another one compiles it anew.
                self._plain_call = nn.Module.__call__
                self._patch = _patched(self, nn.Module.__call__)
            nn.Module.__call__ = self._patch  # type: ignore[method-assign]
            self._is_patched = True
        for entry in list(self._live.values()):
            entry.take_up()

    def _pause(self) -> None:
        # Where somebody has put a patch of theirs over this one, it stays below, and lets all calls pass.
        if self._is_patched and nn.Module.__call__ is self._patch:
            nn.Module.__call__ = self._plain_call  # type: ignore[method-assign, assignment]
            self._is_patched = False
        for entry in list(self._live.values()):
            entry.put_back()

    @property
    def is_watching(self) -> bool:
        """Whether the calls of this thread are looked at."""
        return (self._is_on or self._in_block.get()) and not self._place.is_closed

    def call(self, plain_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a module, of which all that is done for it stands around the plain call."""
        place = self._place
        entry = self._live.get(id(module))
        if entry is None or entry.ref() is not module:
            if is_transparent(module) or is_tracing():
                return plain_call(module, *args, **kwargs)
            try:
                entry = self._entry(module, place.parent)
            except Exception as error:
                # Such as a lazy module, whose first call gives its weights their shapes.
                _logger.debug("a %s is not ready to be looked at: %s", type(module).__name__, error)
                return plain_call(module, *args, **kwargs)
        entry.num_calls += 1
        is_inspected = jit_config.mode == "inspect"
        state = entry.state
        if state == "init" and not is_inspected and not module.training and not is_tracing():
            self._take_up(entry, module)
            state = entry.state
        is_open = state == "eager" or (state == "init" and is_inspected)
        parent = place.parent
        place.parent, place.is_closed = entry, not is_open
        try:
            if is_open and is_inspected:
                return self._timed(entry, plain_call, module, args, kwargs)
            return plain_call(module, *args, **kwargs)
        finally:
            # It was open, or this call would not have been looked at.
            place.parent, place.is_closed = parent, False

    def _timed(self, entry: Entry, plain_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The device is waited for on both sides, so that a module's time holds what it started."""
        wait = torch.accelerator.synchronize if entry.device.partition(":")[0] != "cpu" else None
        if wait is not None:
            wait()
        start_ns = self._clock()
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            if wait is not None:
                wait()
            entry.time_ns = (entry.time_ns or 0) + self._clock() - start_ns

    def _entry(self, module: nn.Module, parent: Entry | None) -> Entry:
        found = self._live.get(id(module))
        if found is not None and found.ref() is module:
            return found
        with self._lock:
            found = self._live.get(id(module))
            if found is not None and found.ref() is module:
                return found
            return self._add(module, parent)

    def _add(self, module: nn.Module, parent: Entry | None) -> Entry:
        outer = parent.ref() if parent is not None else None
        name = name_below(outer, parent.name, module) if parent is not None and outer is not None else None
        name = name or type(module).__name__
        if parent is None:
            count = sum(entry.kind is type(module) and entry.parent is None for entry in self._all)
            name = f"{name}#{count + 1}" if count else name
        entry = entry_of(module, name, parent, weakref.ref(module, self._gone(id(module))))
        entry.reason = why_left_alone(module, entry, jit_config)
        entry.state = "skipped" if entry.reason is not None else "init"
        self._live[id(module)] = entry
        self._all.append(entry)
        return entry

    def _gone(self, key: int) -> Callable[[Any], None]:
        """The module is no more: its weights and what was built of it go, and what was found stays."""

        def forget(_: Any) -> None:
            entry = self._live.pop(key, None)
            if entry is None:
                return
            entry.drop()
            gone = [one for one in self._all if one.control is None and one.ref() is None]
            for old in gone[: max(0, len(gone) - _MAX_GONE)]:
                self._all.remove(old)

        return forget

    def _take_up(self, entry: Entry, module: nn.Module) -> None:
        """Let a module record, once; one whose class cannot be replaced runs as it is."""
        with self._lock:
            if entry.state != "init":
                return
            try:
                control = JitControl(
                    plain_twin(module), entry.name, self.tuner, lambda outcome: self._settle(entry, outcome)
                )
                entry.control, entry.jit_class = control, jit_class(control)
                entry.take_up()
                entry.state = "recording"
            except Exception as error:
                entry.put_back()
                entry.drop()
                entry.state, entry.reason = "eager", f"it cannot be recorded: {type(error).__name__}: {error}"
                _logger.warning("%s runs eager: %s", entry.name, entry.reason)

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        """What became of one form of call of a module."""
        with self._lock:
            same = [graph.name.partition("#")[0] for graph in entry.graphs].count(outcome.report.name)
            name = f"{outcome.report.name}#{same + 1}" if same else outcome.report.name
            entry.graphs.append(outcome.report.model_copy(update={"name": name}))
            if outcome.verdict == "tuned":
                entry.state = "tuned"
                self._detach(entry)
            elif outcome.verdict == "eager" and entry.state == "recording":
                entry.state, entry.reason = "eager", outcome.report.reason
                entry.put_back()
                entry.drop()
                _logger.warning("%s cannot be tuned and runs eager: %s", entry.name, entry.reason)

    def _detach(self, entry: Entry) -> None:
        """Modules in one that is tuned are left alone, and are listed where they would have been tried."""
        module = entry.ref()
        if module is None or entry.level >= jit_config.max_depth_level:
            return
        for child in children_of(module):
            if id(child) not in self._live:
                found = self._add(child, entry)
                if found.state == "init":
                    found.state = "detached"


def _with_children(entry: Entry, entries: list[Entry]) -> Iterator[Entry]:
    yield entry
    for child in entries:
        if child.parent is entry:
            yield from _with_children(child, entries)


def _patched(finder: Finder, plain_call: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of `torch.nn.Module.__call__`."""

    is_compiling = torch.compiler.is_compiling

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Compilers see through to the plain call.
        if is_compiling() or not finder.is_watching:
            return plain_call(self, *args, **kwargs)
        return finder.call(plain_call, self, args, kwargs)

    return call


finder = Finder()
"""Of this process."""
