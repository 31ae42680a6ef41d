"""Make the calls of a capture again, on a stage that somebody has loaded: same inputs, state, generators, settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from perfladder.capturing.compare import Difference, Encoded, compare_values
from perfladder.capturing.context import context_restored, restore_rng
from perfladder.capturing.decode import Decoder, not_rebuildable
from perfladder.capturing.nodes import Node, expanded, held_again, holders_of, labels_of
from perfladder.capturing.standalone_timing import time_ms
from perfladder.capturing.state import read_state, write_state
from perfladder.capturing.store import CapturedCall, Manifest, read_manifest, read_storages
from perfladder.capturing.synthetic import random_blocks
from perfladder.capturing.types import capture_types
from perfladder.errors import CaptureError
from perfladder.instrument import Site
from perfladder.sites import resolve_site
from perfladder.target import LoadedTarget
from perfladder.user_code import user_code

if TYPE_CHECKING:
    from perfladder.capturing.evict import Evictor

_STATE = "state."


@dataclass
class Made:
    """A call that was made again: what went in, as it is now, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Replay:
    """The stage of a capture on a loaded target: restores each call's inputs and state, and makes the call.

    Args:
        loaded: The target, or the stage alone.
        folder: The capture.
        path: Where on the target the stage is; by default where it was captured.
        is_synthetic: Random numbers in place of the captured ones.
        restores_state: Whether the stage's state is put back before each call; else it is what the stage has here.

    Raises:
        CaptureError: The capture is damaged or holds what cannot be rebuilt.
        InputError: The target has no such stage.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        folder: Path,
        *,
        path: str | None = None,
        is_synthetic: bool = False,
        restores_state: bool = True,
    ) -> None:
        self.loaded = loaded
        self.manifest: Manifest = read_manifest(folder)
        self.is_synthetic = is_synthetic
        self.restores_state = restores_state
        for call in self.manifest.calls:
            kinds = {name: node.kind for name, node in call.inputs.items()}
            if kinds != {"args": "tuple", "kwargs": "dict"}:
                raise CaptureError(f"{folder} is damaged: the inputs of call {call.index} are no args and kwargs.")
        where = self.manifest.stage if path is None else path
        self.site: Site = resolve_site(loaded.obj, where, field_name="stage")
        if self.site.owner_type != self.manifest.owner_type:
            raise CaptureError(
                f"{folder} was captured from a {self.manifest.owner_type}, but {where or 'the target'!r} is a "
                f"{self.site.owner_type} here."
            )
        self.blocks = read_storages(folder, self.manifest)
        self._types = capture_types()
        blocks = random_blocks(self.manifest, self.blocks) if is_synthetic else self.blocks
        self._decoder = Decoder(blocks, self.manifest.storages, device=loaded.device, types=self._types)
        self._exact = Decoder(self.blocks, self.manifest.storages, device=loaded.device, types=self._types)
        self._moving: set[str] | None = None
        self._restorable: dict[tuple[int, int], dict[str, Node]] = {}
        self._restored: dict[tuple[int, int], dict[str, Node]] = {}
        self._original: Encoded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Put the stage's state back as it was before the first replay."""
        if self._original is not None:
            nodes = self._original.nodes
            names = _with_linked(self._moving or set(), nodes)
            kept = self._rebuildable({name: node for name, node in nodes.items() if name in names})
            write_state(self.site, Decoder(self._original.blocks, self._original.storages).decode(kept))

    def prepare(self, call: CapturedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the call's inputs in new memory and restore state and generators; not part of the timed time."""
        wanted = self._state_to_restore(call) if self.restores_state else {}
        values = self._decoder.decode({**call.inputs, **wanted})
        write_state(self.site, {name.removeprefix(_STATE): values[name] for name in wanted})
        restore_rng(call.rng, self._exact, self.loaded)
        self.loaded.synchronize()
        return values["args"], values["kwargs"]

    @contextlib.contextmanager
    def settings(self, call: CapturedCall) -> Iterator[None]:
        """The call's own modes, settings and train/eval flag."""
        module = self.site.owner
        was_training = getattr(module, "training", None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(user_code(f"Replaying {self.manifest.stage}"))
            stack.enter_context(context_restored(call.context, self.loaded.device.type, self.loaded.attention()))
            # A capture without the flags of each module inside has that of the whole.
            wanted = call.context.training
            if wanted is not None and wanted != was_training and "training" not in self.manifest.state_before(call):
                module.train(wanted)
                stack.callback(module.train, was_training)
            yield

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the stage."""
        function = self.site.owner if self.site.is_module else getattr(self.site.owner, str(self.site.method))
        return function(*args, **kwargs)

    def replay(self, call: CapturedCall) -> Made:
        """Restore and call once, untimed."""
        args, kwargs = self.prepare(call)
        with self.settings(call):
            output = self.call(args, kwargs)
            self.loaded.synchronize()
        return Made(args, kwargs, output)

    def differences(self, call: CapturedCall, made: Made) -> dict[str, Difference]:
        """How what came of a replayed call differs from what came of it in the pipeline, by path.

        Compared are the output, the inputs that the call changed, and the state that it changed.
        """
        return compare_values(self.expected(call), self.found(call, made), names=("in the pipeline", "in the replay"))

    def found(self, call: CapturedCall, made: Made) -> Encoded:
        """What came of a replayed call, just after it: what `expected` tells of the pipeline."""
        # Only what was captured is compared; what changes besides is restored from now on.
        state = read_state(self.site)
        self._note_moving((set(call.state_after) & set(state)) | self._differing(self._state_before(call), state))
        values = {"output": made.output, "args": made.args, "kwargs": made.kwargs}
        values |= {_STATE + name: state.get(name) for name in call.state_after}
        names = self.expected(call).nodes
        return Encoded.of({name: value for name, value in values.items() if name in names})

    def expected(self, call: CapturedCall) -> Encoded:
        """What came of a call in the pipeline: the output, and the inputs and the state that it changed."""
        nodes = {"output": call.output, **call.inputs_after}
        nodes |= {_STATE + name: node for name, node in call.state_after.items()}
        return Encoded(nodes, self.blocks, self._storages)

    def time_ms(self, call: CapturedCall, evictor: Evictor | None = None) -> float:
        """Restore one call and time it, with the host as far ahead of the device as in the pipeline.

        Args:
            call: Which one.
            evictor: Empties the caches before it.
        """
        args, kwargs = self.prepare(call)
        if evictor is not None:
            evictor.evict()
            self.loaded.synchronize()
        with self.settings(call):
            return time_ms(lambda: self.call(args, kwargs), self.loaded.device, call.lead_ms)

    def state(self) -> Encoded:
        """The stage's state as it is now."""
        return Encoded.of(read_state(self.site), self._types)

    def changing_state(self) -> set[str]:
        """Parts of the stage's state that the captured calls, or the pipeline between them, changed."""
        names = {name for call in self.manifest.calls for name in call.state_after}
        first, *others = (self._expanded(self._state_before(call), call.inputs) for call in self.manifest.calls)
        return names.union(*(_differing_roots(first, other) for other in others))

    @property
    def _storages(self) -> list[int]:
        return list(range(len(self.blocks))) if self.manifest.storages is None else self.manifest.storages

    def _state_to_restore(self, call: CapturedCall) -> dict[str, Node]:
        """What of the state is put back before a replay of that call; the rest is as captured, and stays so."""
        key = call.run, call.index
        if key not in self._restored:
            wanted, state = self._state_before(call), read_state(self.site)
            if self._moving is None:
                self._original = Encoded.of(state, self._types, identity=True)
                self._moving = set()
            self._note_moving(self._differing(wanted, state))
            names = _with_linked(self._moving, wanted)
            self._restored[key] = {_STATE + name: node for name, node in wanted.items() if name in names}
        return self._restored[key]

    def _state_before(self, call: CapturedCall) -> dict[str, Node]:
        """The state that could be stored; what could not stays as it is here."""
        key = call.run, call.index
        if key not in self._restorable:
            self._restorable[key] = self._rebuildable(self.manifest.state_before(call))
        return self._restorable[key]

    def _rebuildable(self, nodes: Mapping[str, Node]) -> dict[str, Node]:
        holders = holders_of(nodes.values())
        kept = {n: node for n, node in nodes.items() if not not_rebuildable({n: expanded(node, holders)}, self._types)}
        held = holders_of(kept.values())
        lost = {label: node for label, node in holders.items() if label not in held}
        return {name: held_again(node, lost) for name, node in kept.items()}

    def _differing(self, nodes: dict[str, Node], state: dict[str, Any]) -> set[str]:
        """Parts of the stage's state that are not as these nodes have them.

        A part that is an object of the inputs is always among them, since each replay has inputs of its own.
        """
        here = {name: state[name] for name in nodes if name in state}
        return _differing_roots(self._expanded(nodes), Encoded.of(here, self._types))

    def _expanded(self, nodes: Mapping[str, Node], inputs: Mapping[str, Node] | None = None) -> Encoded:
        """The nodes without references: to objects that other ones hold, or the inputs where they are given."""
        holders = holders_of([*(inputs or {}).values(), *nodes.values()])
        return Encoded({n: expanded(node, holders) for n, node in nodes.items()}, self.blocks, self._storages)

    def _note_moving(self, names: set[str]) -> None:
        """Remember parts of the state that change, so that they are put back before every replay."""
        assert self._moving is not None
        if not names <= self._moving:
            self._moving |= names
            self._restored.clear()


def _differing_roots(expected: Encoded, found: Encoded) -> set[str]:
    differences = compare_values(expected, found)
    roots = sorted({*expected.nodes, *found.nodes}, key=len, reverse=True)
    return {next(root for root in roots if path == root or path.startswith(f"{root}.")) for path in differences}


def _with_linked(names: set[str], nodes: Mapping[str, Node]) -> set[str]:
    """These roots, and those that share an object with them: what is one object is rebuilt together."""
    labels = {name: found for name, node in nodes.items() if (found := labels_of(node))}
    chosen, grown = set(names), True
    while grown:
        known = set().union(*(labels[name] for name in chosen if name in labels))
        more = {name for name, found in labels.items() if name not in chosen and found & known}
        chosen, grown = chosen | more, bool(more)
    return chosen
