"""A module that is tuned while the program runs: it records calls, has them tuned, and serves them from then on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from perfladder._torch_private import is_tracing
from perfladder.tuning.config import config
from perfladder.tuning.control import Call, Chosen, ModuleControl, Recording
from perfladder.tuning.graphs import GraphSpec, GraphTable
from perfladder.tuning.module import Own, wrapper_class
from perfladder.tuning.samples import Sample
from perfladder.tuning.tree import output_leaves, parameter_names

if TYPE_CHECKING:
    from perfladder.jit.tuner import Outcome, Tuner

_logger = logging.getLogger("perfladder.jit")

_MAX_TUNINGS: Final = 3
"""Of one form of call: the first one, and those for sizes that came later. A size that grows with every call, as that
of a cache of tokens does, would otherwise be tuned again and again."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """A call that is being recorded."""

    graph: GraphSpec
    sample: Sample | None


class JitControl(ModuleControl):
    """What a module does that is tuned as it runs.

    A call is served by what was chosen for its form; a form that is new is recorded, and tuned once there are enough
    calls of it. Whatever goes wrong in between, the call returns what the plain module returns.

    Args:
        inner: The module, as an object of its own class.
        name: By which it is listed.
        tuner: Tunes.
        on_outcome: Is told of each form of call that was tuned or could not be.
    """

    def __init__(self, inner: nn.Module, name: str, tuner: Tuner, on_outcome: Callable[[Outcome], None]) -> None:
        super().__init__(inner, name, None, None, None)
        table = GraphTable(
            parameter_names(self.plain), strict=config.strict_mode, limit=tuner.settings().max_num_graphs
        )
        self.recording: Recording = Recording(table, is_asked=False)
        self.form_keys: dict[str, str] = {}
        self._tuner, self._on_outcome = tuner, on_outcome
        self._num_tuned_samples: dict[str, int] = {}
        self._num_tunings: Counter[str] = Counter()
        self._is_tuning = False
        self._state, self._route = "recording", lambda args, kwargs: self._learn(*args, **kwargs)

    def _dispatcher(self, snapshot: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        serve = super()._dispatcher(snapshot)

        def route(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_tracing() or (torch.is_grad_enabled() and _wants_gradients(args, kwargs)):
                return self.plain(*args, **kwargs)
            return serve(args, kwargs)

        return route

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_error: bool) -> tuple[Call, bool]:
        # What this returns is kept for the form of call, and whether a call is left alone is no part of its form.
        found = None if self._is_left_alone(args, kwargs) else self._found(args, kwargs)
        return found or (self._learn, False)

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, bool] | None:
        """What serves a call, and whether that was tuned; None for a form that is new."""
        table, chosen = self._table, self.chosen
        graph = table.find(args, kwargs) if table is not None else None
        for one in chosen if graph is not None else ():
            if one.graph is graph:
                return one.call or self.plain, one.call is not None
        return None

    def _is_left_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one that tuned code could not take over, or that must not be recorded."""
        device_type = self.device.type
        return (
            self.inner.training
            or torch.is_autocast_enabled(device_type)
            or is_tracing()
            or (device_type == "cuda" and torch.cuda.is_current_stream_capturing())
            or (torch.is_grad_enabled() and _wants_gradients(args, kwargs))
        )

    def _learn(self, *args: Any, **kwargs: Any) -> Any:
        """A call of a form that was not served yet."""
        if self._is_left_alone(args, kwargs):
            return self.plain(*args, **kwargs)
        found = self._found(args, kwargs)
        seen = self._see(args, kwargs) if found is None else None
        if seen is not None and self._recall(seen, args, kwargs):
            found, seen = self._found(args, kwargs), None
        if found is not None and found[1]:
            with torch.no_grad():
                return found[0](*args, **kwargs)
        if seen is None:
            return self.plain(*args, **kwargs)
        result = self.plain(*args, **kwargs)
        if self._keep_result(seen, result):
            self._tune_due()
        return result

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seen | None:
        """Record a call before it is made; None: it cannot be, or there is no more use in it."""
        with self._lock:
            if self._is_tuning:
                return None
            try:
                graph = self.recording.table.observe(args, kwargs)
                if self._num_tunings[graph.name] >= _MAX_TUNINGS:
                    return None
                kept = self.recording.samples.setdefault(graph.name, [])
                is_wanted = len(kept) < config.max_num_samples_stored
                return _Seen(graph, Sample.of(args, kwargs, None) if is_wanted else None)
            except Exception as error:
                self._tell_once(f"{self.name} runs eager: {error}")
                return None

    def _keep_result(self, seen: _Seen, result: Any) -> bool:
        """Record what a call returned; tells whether something can be tuned now."""
        with self._lock:
            if self._is_tuning:
                return False
            try:
                self.recording.table.observe_output(seen.graph, result)
            except Exception as error:
                self._tell_once(f"{self.name}: what it returns cannot be recorded: {error}")
                self._num_tunings[seen.graph.name] = _MAX_TUNINGS
                return False
            if seen.sample is not None:
                self.recording.samples[seen.graph.name].append(seen.sample)
            return any(map(self._is_due, self.recording.table.graphs))

    def _is_due(self, graph: GraphSpec) -> bool:
        settings = self._tuner.settings()
        is_missing_axis = settings.batch_axis_required and settings.min_samples > 1 and not graph.has_dynamic_axis
        return (
            self._tuner.may_tune()
            and bool(self.recording.samples.get(graph.name))
            and self._num_tunings[graph.name] < _MAX_TUNINGS
            and graph.num_samples - self._num_tuned_samples.get(graph.name, 0) >= settings.min_samples
            and not is_missing_axis
        )

    def _recall(self, seen: _Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Serve a form of call as an earlier process did, before it is called for the first time."""
        graph, table = seen.graph, self.recording.table
        if graph.num_samples > 1 or seen.sample is None or not self._tuner.may_tune():
            return False
        known = self._tuner.recall(self, graph)
        if known is None:
            return False
        with self._lock:
            if self._is_tuning:
                return False
            table.adopt(known)
            if table.find(args, kwargs) is not known:
                table.adopt(graph)
                return False
            self.recording.samples[graph.name].append(seen.sample)
            self._is_tuning = True
        self._tune([known])
        return True

    def _tune_due(self) -> None:
        with self._lock:
            due = [] if self._is_tuning else [g for g in self.recording.table.graphs if self._is_due(g)]
            if not due:
                return
            self._is_tuning = True
        self._tune(due)

    def _tune(self, graphs: list[GraphSpec]) -> None:
        """Tune; other threads record nothing meanwhile, and run eager."""
        try:
            for graph in graphs:
                outcome = self._tuner.tune(self, graph)
                with self._lock:
                    self._settle(graph, outcome.chosen)
                self._on_outcome(outcome)
        except Exception as error:
            # The program's own call has its result, and goes on.
            _logger.warning("%s: what was chosen cannot be served: %s", self.name, error, exc_info=error)
            self._num_tunings.update({graph.name: _MAX_TUNINGS for graph in graphs})
        finally:
            self._is_tuning = False

    def _settle(self, graph: GraphSpec, chosen: Chosen | None) -> None:
        """Serve a graph by what was chosen; where nothing could be and others are served, by the plain module."""
        self._num_tuned_samples[graph.name] = graph.num_samples
        self._num_tunings[graph.name] += 1
        del self.recording.samples[graph.name][1:]
        others = [one for one in self.chosen if one.graph.name != graph.name]
        if chosen is None:
            self._num_tunings[graph.name] = _MAX_TUNINGS
            if not others or len(others) < len(self.chosen):
                return
        model = self.recording.table.to_model()
        frozen = replace(chosen or Chosen(graph, None, "eager"), graph=GraphSpec.from_model(graph.to_model()))
        served = [*others, frozen]
        table = GraphTable.from_model(model.model_copy(update={"graphs": []}))
        for one in served:
            table.graphs.append(one.graph)
            table.adopt(one.graph)
        self.set_tuned(table, served, config.snapshot())

    def _tell_once(self, text: str) -> None:
        if not self.num_unseen_calls[text]:
            _logger.warning("%s", text)
        self.num_unseen_calls[text] += 1


def _wants_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gradients are asked for by an argument; weights ask for them in most programs that want none."""
    leaves = [*output_leaves(args), *output_leaves(kwargs)]
    return any(leaf.kind == "tensor" and leaf.value.requires_grad for leaf in leaves)


class JitModule(nn.Module):
    """What a module's class has besides, while the module is tuned as it runs: what `perfladder.managed` reads."""

    perfladder_managed = Own(lambda control: "jit")
    perfladder_name = Own(lambda control: control.name)
    perfladder_state = Own(lambda control: control.state)


def plain_twin(module: nn.Module) -> nn.Module:
    """Another object of the module's own class, with the same weights, parts, hooks and attributes."""
    twin: nn.Module = nn.Module.__new__(type(module))
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def jit_class(control: JitControl) -> type:
    """The class that a module gets while it is tuned as it runs; it is copied and pickled as a plain one."""
    inner = control.inner
    # In the form of protocol 1: that of later ones has to name the very class of the object.
    return wrapper_class(control, JitModule, __reduce_ex__=lambda _self, _protocol: inner.__reduce_ex__(1))
