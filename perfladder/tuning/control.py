"""What a wrapped module does at a call: it records how it is called, and then calls what was chosen for each form."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import nn

from perfladder.errors import InputError, TuningError, UnseenGraphWarning
from perfladder.tuning.config import TuningSettings, config
from perfladder.tuning.dims import SemanticPath, Shape
from perfladder.tuning.graphs import GraphSpec, GraphTable
from perfladder.tuning.keys import call_key
from perfladder.tuning.samples import Sample
from perfladder.tuning.tree import output_leaves, parameter_names

if TYPE_CHECKING:
    from pathlib import Path

    from perfladder.backend.base import Backend
    from perfladder.tuning.records import DecisionRecord
    from perfladder.tuning.strategies import TuneStrategy

State = Literal["init", "passthrough", "recording", "tuned"]
Call = Callable[..., Any]

_MAX_KNOWN_CALLS: Final = 4096
"""So many forms of call are looked up at once; a form beyond them is checked against the graphs at each call."""

_logger = logging.getLogger("perfladder.tuning")


@dataclass(eq=False)
class Recording:
    """The graphs seen so far, and samples of each.

    Attributes:
        table: The graphs.
        is_asked: Somebody called `enable_recording`; otherwise it is of first calls, or of `tune`, and `tune` begins
            anew, since the batch size of such calls is not known, or they are those of an earlier dataset.
        samples: By name of the graph.
        error: Why calls are recorded no more.
    """

    table: GraphTable
    is_asked: bool
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    error: InputError | None = None


@dataclass(frozen=True, eq=False)
class Chosen:
    """What serves one graph.

    Attributes:
        graph: The form of call.
        call: Takes the module's arguments; None: the module itself.
        description: The backend, in words.
        backend: None: the module itself.
        folder: Holds what its build wrote.
        record: Why it was chosen; None for what was loaded from an archive that tells no more.
        owns_weights: What serves it has a copy of the weights, as they were when it was built.
    """

    graph: GraphSpec
    call: Call | None
    description: str
    backend: Backend | None = None
    folder: Path | None = None
    record: DecisionRecord | None = None
    owns_weights: bool = False


@dataclass(eq=False)
class RecordingSession:
    """One recording by `tune`: the batch size of the calls that are made now, and who was called."""

    batch_size: int | None = None
    called: list[ModuleControl] = field(default_factory=list)


recording_session: ContextVar[RecordingSession | None] = ContextVar("recording_session", default=None)


class ModuleControl:
    """What a wrapped module does at a call, and how that changes; one for each wrapper.

    Calls read `_route`, which is replaced as a whole and never changed, so that threads need no lock.

    Attributes:
        inner: The module as it was given.
        plain: Its forward, without the hooks of a call.
        name: By which it is listed.
        chosen: What serves each graph, once tuned.
        num_unseen_calls: Calls that ran eager after tuning, by reason.
    """

    def __init__(
        self,
        inner: nn.Module,
        name: str,
        strategy: TuneStrategy | None,
        strategies: Sequence[TuneStrategy] | Mapping[str, TuneStrategy] | None,
        dynamic_shapes: Mapping[SemanticPath, Shape] | None,
    ) -> None:
        self.inner = inner
        self.plain: Call = own_forward(inner)
        self.name = name
        self.strategy = strategy
        self.strategies = strategies
        self.dynamic_shapes = dynamic_shapes
        self.path: str | None = None
        self.inspected: Any = None
        self.session: RecordingSession | None = None
        self.recording: Recording | None = None
        self.chosen: tuple[Chosen, ...] = ()
        self.builds: dict[str, Any] = {}
        self.num_unseen_calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._state: State = "init"
        self._active: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._table: GraphTable | None = None
        self._home: torch.device | None = None
        self._route: Callable[[tuple[Any, ...], dict[str, Any]], Any] = self._first_call

    @property
    def state(self) -> State:
        """One of init, passthrough, recording, tuned."""
        return self._state

    @property
    def device(self) -> torch.device:
        """Where the module's weights are; of one without any, where its recorded arguments are; else the CPU."""
        tensors: Iterable[torch.Tensor] = chain(self.inner.parameters(), self.inner.buffers(), self._recorded_tensors())
        return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))

    def _recorded_tensors(self) -> Iterator[torch.Tensor]:
        for samples in self.recording.samples.values() if self.recording is not None else ():
            for sample in samples[:1]:
                leaves = [*output_leaves(sample.args), *output_leaves(sample.kwargs)]
                yield from (leaf.value for leaf in leaves if leaf.kind == "tensor")

    @property
    def table(self) -> GraphTable | None:
        """The graphs that are served, once tuned."""
        return self._table

    @property
    def has_lost_weights(self) -> bool:
        """Whether the plain module cannot run, since its weights were given up."""
        return any(weight.device.type == "meta" for weight in self.inner.parameters())

    @property
    def graphs(self) -> list[GraphSpec]:
        """The forms of call that were recorded.

        Raises:
            InputError: None was.
        """
        table = self._table if self._state == "tuned" else self.recording.table if self.recording else None
        if table is None or not table.graphs:
            raise InputError(f"{self.name}: nothing was recorded yet; call the module, or pl.tune, first.")
        return list(table.graphs)

    def strategy_of(self, graph: GraphSpec, default: TuneStrategy) -> TuneStrategy:
        """The strategy of one graph: by its name or position, else the module's, else the default."""
        if isinstance(self.strategies, Mapping):
            return self.strategies.get(graph.name) or self.strategy or default
        if self.strategies:
            position = int(graph.name)
            return self.strategies[position] if position < len(self.strategies) else self.strategies[-1]
        return self.strategy or default

    def enable_passthrough(self, *, force: bool = False) -> None:
        """Call the module as it is; what was recorded is kept.

        Raises:
            TuningError: It is tuned, and `force` is not given.
        """
        self._leave_tuned("passthrough", force)
        self._state, self._route = "passthrough", self._pass

    def enable_recording(self, *, force: bool = False) -> None:
        """Record calls from now on, after those that were recorded before.

        Raises:
            TuningError: It is tuned, and `force` is not given, with which the recording begins anew.
        """
        self._leave_tuned("recording", force)
        self._begin_recording(is_asked=True)

    def record_anew(self) -> None:
        """Record for `tune`: from the start, but after calls that were recorded because somebody asked for it."""
        self._leave_tuned("recording", force=True)
        if self.recording is not None and not self.recording.is_asked:
            self.recording = None
        self._begin_recording(is_asked=False)

    def saved(self) -> Callable[[], None]:
        """What puts the module back into the state it is in now, with what was chosen and recorded."""
        names = ("_state", "_route", "_active", "_table", "_home", "chosen", "recording")
        values = {name: getattr(self, name) for name in names}
        return lambda: vars(self).update(values)

    def _begin_recording(self, *, is_asked: bool) -> None:
        if self.has_lost_weights:
            raise TuningError(
                f"{self.name}: its original weights were given up (config.device_after_tuning = 'meta'), so that it "
                "cannot be recorded; load them again first."
            )
        if self.recording is None:
            snapshot = config.snapshot()
            table = GraphTable(
                parameter_names(self.plain),
                strict=snapshot.strict_mode,
                limit=snapshot.max_num_graphs,
                dynamic_shapes=self.dynamic_shapes,
            )
            self.recording = Recording(table, is_asked)
        self._state, self._route = "recording", self._record

    def activate(self) -> None:
        """Call what was chosen, after `deactivate`.

        Raises:
            TuningError: There is nothing to activate.
        """
        if self._state == "passthrough":
            return
        if self._state != "tuned" or self._active is None:
            raise TuningError(
                f"{self.name} is in state {self._state}: only a tuned module is activated; tune it first."
            )
        self._route = self._active

    def deactivate(self) -> None:
        """Call the module as it is, until `activate`; only a tuned module knows this."""
        if self._state == "tuned":
            self._route = self._pass

    def set_tuned(self, table: GraphTable, chosen: Sequence[Chosen], snapshot: TuningSettings) -> None:
        """Serve each graph by what was chosen for it."""
        self.chosen, self._table, self._home = tuple(chosen), table, self.device
        self._active = self._dispatcher(snapshot)
        self._state, self._route = "tuned", self._active

    @contextmanager
    def trying(self, graph: GraphSpec, call: Call) -> Iterator[None]:
        """Serve one graph by a candidate inside the block."""
        table, before = self.recording.table if self.recording else self._table, self._route
        assert table is not None, "a graph was recorded"

        def route(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (call if table.find(args, kwargs) is graph else self.plain)(*args, **kwargs)

        self._route = route
        try:
            yield
        finally:
            self._route = before

    def give_up(self, reason: str, *, copies_only: bool) -> None:
        """Run as the plain module again, since what was chosen does not hold any more.

        Args:
            reason: Why.
            copies_only: Only where something that serves calls has a copy of the weights.
        """
        if self._state != "tuned" or (copies_only and not any(chosen.owns_weights for chosen in self.chosen)):
            return
        warnings.warn(f"{self.name} is not tuned any more: {reason} Tune it again.", UserWarning, stacklevel=4)
        self.builds.clear()  # with what they hold of a device's memory
        self.enable_passthrough(force=True)

    def _leave_tuned(self, wanted: str, force: bool) -> None:
        if self._state != "tuned":
            return
        if not force:
            raise TuningError(f"{self.name} is tuned; enable_{wanted}(force=True) gives up what was chosen.")
        self.chosen, self._table, self._active, self.recording = (), None, None, None

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.plain(*args, **kwargs)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            if self._state == "init":
                self._begin_recording(is_asked=False)
        return self._route(args, kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = recording_session.get() or self.session
        batch_size = session.batch_size if session is not None else None
        recording = self.recording
        assert recording is not None, "recording has begun"
        with self._lock:
            if session is not None and self not in session.called:
                session.called.append(self)
            graph = self._observed(recording, args, kwargs, batch_size)
        if graph is None:
            return self.plain(*args, **kwargs)
        with self._lock:
            kept = recording.samples.setdefault(graph.name, [])
            sample = None
            if _is_wanted(kept, batch_size, config.max_num_samples_stored):
                sample = Sample.of(args, kwargs, batch_size)
        result = self.plain(*args, **kwargs)
        with self._lock:
            recording.table.observe_output(graph, result, batch_size)
            if sample is not None:
                _keep(kept, sample, config.max_num_samples_stored)
        return result

    def _observed(
        self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int | None
    ) -> GraphSpec | None:
        """The graph of a call; None once the recording has failed, which is no reason for the call to fail."""
        if recording.error is not None:
            return None
        try:
            return recording.table.observe(args, kwargs, batch_size)
        except InputError as error:
            recording.error = error
            warnings.warn(f"{self.name} records no more calls. {error}", UserWarning, stacklevel=4)
            return None

    def _dispatcher(self, snapshot: TuningSettings) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The route of a tuned module: a table of known forms of call, and the graphs for those that are new."""
        known: dict[Hashable, tuple[Call, bool]] = {}
        inner, strict, resolve = self.inner, snapshot.strict_mode, self._resolve
        is_error = snapshot.unseen_graph == "error"
        device_type = self.device.type
        is_autocast, is_grad_enabled, no_grad = torch.is_autocast_enabled, torch.is_grad_enabled, torch.no_grad

        def route(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                key = call_key(args, kwargs, strict)
            except RuntimeError:  # a nested tensor has no shape
                key = None
            found = known.get(key) if key is not None else None
            if found is None or inner.training or is_autocast(device_type):
                found = resolve(args, kwargs, is_error)
                if (
                    key is not None
                    and len(known) < _MAX_KNOWN_CALLS
                    and not (inner.training or is_autocast(device_type))
                ):
                    known[key] = found
            call, is_tuned = found
            if is_tuned and is_grad_enabled():
                with no_grad():
                    return call(*args, **kwargs)
            return call(*args, **kwargs)

        return route

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_error: bool) -> tuple[Call, bool]:
        """What serves a call of a form that was not met before, and whether that was tuned."""
        if self.inner.training:
            return self._unseen("The module is in training mode.", is_error), False
        if torch.is_autocast_enabled(self.device.type):
            return self._unseen("It is called under autocast, and was tuned without.", is_error), False
        assert self._table is not None, "it is tuned"
        graph = self._table.find(args, kwargs)
        if graph is not None:
            for chosen in self.chosen:
                if chosen.graph.name == graph.name:
                    return chosen.call or self.plain, chosen.call is not None
        return self._unseen(self._table.why_unseen(args, kwargs), is_error), False

    def _unseen(self, reason: str, is_error: bool) -> Call:
        """The plain module, counting its calls; the first one for this reason warns."""
        lost = self.has_lost_weights
        if is_error or lost:
            remedy = (
                "Its original weights were given up (config.device_after_tuning = 'meta'), so that it cannot run eager."
                if lost
                else "Tune with such a call, or let it run eager: config.unseen_graph = 'eager'."
            )
            raise TuningError(f"{self.name} was tuned for other calls. {reason} {remedy}")
        if self._home is not None and self._home != self.device:
            _logger.info("%s: the original goes back to %s for a call that was not tuned", self.name, self._home)
            self.inner.to(self._home)
        if not self.num_unseen_calls[reason]:
            warnings.warn(f"{self.name} runs eager. {reason}", UnseenGraphWarning, stacklevel=2)

        def counting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.num_unseen_calls[reason] += 1
            return self.plain(*args, **kwargs)

        return counting


def _is_wanted(kept: Sequence[Sample], batch_size: int | None, limit: int) -> bool:
    """Whether a sample is kept: up to the limit each is, and beyond it one of a new batch size while sizes repeat."""
    sizes = {sample.batch_size for sample in kept}
    return len(kept) < limit or (batch_size not in sizes and len(sizes) < len(kept))


def _keep(kept: list[Sample], sample: Sample, limit: int) -> None:
    """Add a sample; where there are enough, in the place of the last one of the most frequent batch size."""
    if len(kept) >= limit:
        (most, _), *_ = Counter(other.batch_size for other in kept).most_common(1)
        kept.remove(next(other for other in reversed(kept) if other.batch_size == most))
    kept.append(sample)


def own_forward(inner: nn.Module) -> Call:
    """The module's forward; one that lies in its attributes, as hooks of other libraries do, is read at each call."""
    if "forward" not in vars(inner):
        return inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner.forward(*args, **kwargs)

    functools.update_wrapper(forward, inner.forward)
    return forward
