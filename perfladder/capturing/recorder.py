"""Copies what a stage receives, returns and changes in chosen calls, while the pipeline runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perfladder.capturing.context import read_context, rng_states
from perfladder.capturing.encode import BudgetError, Encoder
from perfladder.capturing.nodes import PLAIN, Node, is_linked, leaves_of
from perfladder.capturing.side_effects import side_effects
from perfladder.capturing.state import read_state, weight_changes
from perfladder.capturing.store import CapturedCall
from perfladder.instrument import Observer, Site, instrument
from perfladder.target import LoadedTarget

STATE_ROOT = "state."
"""Before the path of each part of the stage's state, among the roots that are encoded together."""


class Recorder(Observer):
    """Copies the inputs of the chosen calls before they run, and what came of them after.

    Args:
        loaded: The target that runs.
        is_chosen: Tells by its index in the run whether a call is to be captured.
        encoder: Holds what was copied.
        redact: Leave out of the state what may hold a user's data.

    Attributes:
        calls: What was captured, in the order in which the calls ended.
        num_over_budget: Chosen calls that were not captured for want of room.
        num_raised: Chosen calls that raised, and so have nothing to compare with.
        streams_output: Whether a call streams its output, or is awaited.
        changed_weights: Parameters that a captured call changed in place.
        run: Number of the run that the next calls belong to.
    """

    def __init__(
        self, loaded: LoadedTarget, is_chosen: Callable[[int], bool], encoder: Encoder, *, redact: bool = False
    ) -> None:
        self.loaded = loaded
        self.is_chosen = is_chosen
        self.encoder = encoder
        self.redact = redact
        self.calls: list[CapturedCall] = []
        self.num_over_budget = 0
        self.num_raised = 0
        self.streams_output = False
        self.changed_weights: dict[str, None] = {}
        self.run = 0
        self._num_seen = 0

    def record_run(self, site: Site, run: int = 0) -> None:
        """Run the target once, and copy the chosen calls of that stage in it."""
        self.loaded.prepare_run()
        self.run, self._num_seen = run, 0
        with instrument([site], self):
            self.loaded.run()

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenCapture | None:
        """Copy the inputs of a chosen call, with all that surrounds it."""
        index, self._num_seen = self._num_seen, self._num_seen + 1
        if not self.is_chosen(index):
            return None
        try:
            return _OpenCapture(self, site, index, args, kwargs)
        except BudgetError:
            self.num_over_budget += 1
            return None

    def leave(self, site: Site, token: _OpenCapture | None, result: Any) -> None:
        """Copy what the call returned and what it changed."""
        if token is None:
            return
        effects = token.end_watching()
        if result is None and sys.exception() is not token.exception_before:
            self.num_raised += 1
            return
        try:
            self.calls.append(token.finished(result, effects))
        except BudgetError:
            self.num_over_budget += 1

    def enter_item(self, site: Site) -> None:
        """A stage that streams its output cannot be replayed as one call."""
        self.streams_output = True

    def without_repeated_state(self, calls: list[CapturedCall]) -> tuple[dict[str, Node], list[CapturedCall]]:
        """The state at the first call, and the calls with only what differs from it.

        What refers to an object of its own call, or is referred to, stays with that call.
        """
        if not calls:
            return {}, []
        common = {name: node for name, node in calls[0].owner_state.items() if not is_linked(node)}
        return common, [
            call.model_copy(
                update={
                    "owner_state": {
                        name: node
                        for name, node in call.owner_state.items()
                        if name not in common or not _same(common[name], node, self.encoder)
                    }
                }
            )
            for call in calls
        ]

    def read_state(self, site: Site) -> dict[str, Any]:
        """The stage's state by root name."""
        state = read_state(site)
        if self.redact:
            state = {name: value for name, value in state.items() if type(value) in PLAIN and type(value) is not str}
        return {STATE_ROOT + name: value for name, value in state.items()}


class _OpenCapture:
    """One chosen call between its begin and its end."""

    def __init__(
        self, recorder: Recorder, site: Site, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from torch import nn

        self.recorder, self.site, self.index = recorder, site, index
        self.exception_before = sys.exception()
        self.values = {"args": args, "kwargs": kwargs}
        state = recorder.read_state(site)
        encoded = recorder.encoder.encode({**self.values, **state}, keep=state, identity=True)
        self.inputs = {name: encoded[name] for name in self.values}
        self.state = {name: encoded[name] for name in state}
        rng = rng_states(recorder.loaded)
        self.rng = recorder.encoder.encode(rng, keep=rng)
        self.context = read_context(site.owner if isinstance(site.owner, nn.Module) else None)
        self.weights = weight_changes(site)
        self._watching = contextlib.ExitStack()
        self._effects = self._watching.enter_context(side_effects())

    def end_watching(self) -> list[str]:
        """What the call has done to the outside."""
        self._watching.close()
        return list(self._effects)

    def finished(self, result: Any, effects: list[str]) -> CapturedCall:
        """The call as it is stored."""
        recorder, encoder = self.recorder, self.recorder.encoder
        for name, count in weight_changes(self.site).items():
            if count != self.weights.get(name):
                recorder.changed_weights[name] = None
        state = recorder.read_state(self.site)
        encoded = encoder.encode({**self.values, **state}, keep=state, identity=True)
        mutated = changed_leaves(self.inputs, {name: encoded[name] for name in self.values}, encoder)
        state_after = {name: encoded[name] for name in state}
        changed = [name for name in changed_roots(self.state, state_after, encoder) if name in state]
        # Each on its own, since they are compared and not rebuilt together.
        output = encoder.encode({"output": result})["output"]
        inputs_after = encoder.encode(self.values) if mutated else {}
        state_after = encoder.encode({name: state[name] for name in changed}, keep=changed)
        return CapturedCall(
            index=self.index,
            run=recorder.run,
            inputs=self.inputs,
            output=output,
            context=self.context,
            rng=self.rng,
            owner_state={name.removeprefix(STATE_ROOT): node for name, node in self.state.items()},
            mutated=mutated,
            inputs_after=inputs_after,
            state_after={name.removeprefix(STATE_ROOT): node for name, node in state_after.items()},
            side_effects=effects,
        )


def changed_leaves(before: Mapping[str, Node], after: Mapping[str, Node], encoder: Encoder) -> list[str]:
    """Paths of the leaves that are not what they were; both sides must be of one encoder."""
    sides = [leaves_of(nodes) for nodes in (before, after)]
    return sorted(
        path
        for path in {**sides[0], **sides[1]}
        if path not in sides[0] or path not in sides[1] or not _same(sides[0][path], sides[1][path], encoder)
    )


def changed_roots(before: Mapping[str, Node], after: Mapping[str, Node], encoder: Encoder) -> list[str]:
    """Names of the roots that are not what they were, in order; both sides must be of one encoder."""
    names: Iterable[str] = {**before, **after}
    return [n for n in names if n not in before or n not in after or not _same(before[n], after[n], encoder)]


def _same(left: Node, right: Node, encoder: Encoder) -> bool:
    """Whether two nodes stand for the same values, wherever their memory begins."""
    if left.kind == right.kind == "same":
        return True
    if (left.kind, left.value, left.keys, left.type_name) != (right.kind, right.value, right.keys, right.type_name):
        return False
    if type(left.value) is not type(right.value):
        return False
    if left.tensor is not None and right.tensor is not None:
        blocks = [encoder.storages[node.tensor.storage] for node in (left, right) if node.tensor]
        forms = [node.tensor.model_copy(update={"storage": 0}) for node in (left, right) if node.tensor]
        return blocks[0] == blocks[1] and forms[0] == forms[1]
    here, there = left.items or [], right.items or []
    return len(here) == len(there) and all(_same(one, other, encoder) for one, other in zip(here, there, strict=True))
