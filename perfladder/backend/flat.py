"""A call as tensors in and tensors out, which is what exporters take: arguments taken apart, results put together."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import nn

from perfladder._torch_private import change_count
from perfladder.backend.base import BuildRequest
from perfladder.errors import InputError, TuningError
from perfladder.models import Model
from perfladder.tuning.containers import MAPPINGS, container_of, is_sequence_type
from perfladder.tuning.dims import Path
from perfladder.tuning.graphs import GraphSpec
from perfladder.tuning.samples import copy_arguments
from perfladder.tuning.tree import Leaf, bind, input_leaves, map_tensors, output_leaves, scalar_text, take_apart

Layout = Literal["contiguous", "channels_last", "channels_last_3d"]
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""What was built: takes the tensors among the arguments, gives those of the result that are no arguments."""

_FORMATS: Final = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_ALIGNMENT_BYTES: Final = 16
"""Of every tensor that torch allocates; compiled kernels may load so many bytes at once."""


class FlatInput(Model):
    """One of the tensors among the arguments, as a build expects it."""

    path: Path
    access_path: str
    layout: Layout = "contiguous"
    is_on_cpu: bool = False

    def contiguous(self) -> FlatInput:
        """The same for a build that reads memory in order of the axes."""
        return self.model_copy(update={"layout": "contiguous"})

    def fitted(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor in the memory layout that was built for; the same object if it has that already.

        Raises:
            InputError: It is on another device.
        """
        there = tensor.device
        if there.type != ("cpu" if self.is_on_cpu else device.type) or (not self.is_on_cpu and there != device):
            wanted = "cpu" if self.is_on_cpu else device
            raise InputError(f"`{self.access_path}` is on {there}, but was on {wanted} when the module was tuned.")
        fitted = tensor.resolve_neg().contiguous(memory_format=_FORMATS[self.layout])
        return fitted.clone() if fitted.data_ptr() % _ALIGNMENT_BYTES else fitted


def layout_of(tensor: torch.Tensor) -> Layout:
    """The memory format to build for."""
    if not tensor.is_contiguous():
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            return "channels_last"
        if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
            return "channels_last_3d"
    return "contiguous"


def why_not_flat(graph: GraphSpec) -> str | None:
    """Why calls of a graph cannot be made of tensors alone; None if they can."""
    if not graph.inputs:
        return "no argument of its calls is a tensor"
    for spec in graph.unsupported:
        return (
            f"the argument `{spec.access_path}` is a {spec.type}, in which no tensors can be seen: "
            "pl.register_input_type tells how to"
        )
    for spec in graph.others:
        if spec.varies:
            return (
                f"the argument `{spec.access_path}` is no tensor and changes between calls, but would be built in as "
                f"{spec.value}: tune with config.strict_mode = True"
            )
    if graph.output_change is not None:
        return f"its results are not all of one form: {graph.output_change}"
    for spec in graph.output_others:
        if spec.varies:
            return f"`{spec.access_path}` is no tensor and changes between calls"
    return None


class OutputForm:
    """How a result is put together: from tensors that were computed, arguments that are passed on, and constants.

    Attributes:
        num_computed: Tensors that a call computes; one that lies in two places counts once.
        changed: Positions of the input tensors that a call changes in place.
    """

    def __init__(self, output: Any, inputs: Sequence[torch.Tensor], changed: Sequence[int] = ()) -> None:
        for leaf in output_leaves(output):
            if leaf.kind == "unsupported":
                raise TuningError(
                    f"`{leaf.access_path}` of its result is a {type(leaf.value).__qualname__}, which cannot be made "
                    "again: pl.register_input_type tells how to."
                )
        self.changed = tuple(changed)
        passed = {id(tensor): index for index, tensor in enumerate(inputs)}
        computed: dict[int, int] = {}
        self._computed: list[tuple[int, int]] = []
        self._passed: list[tuple[int, int]] = []
        for position, part in enumerate(take_apart(output)[0]):
            if not isinstance(part, torch.Tensor):
                continue
            if id(part) in passed:
                self._passed.append((position, passed[id(part)]))
            else:
                self._computed.append((position, computed.setdefault(id(part), len(computed))))
        self.num_computed = len(computed)
        # What is kept must not hold the tensors of the call it was learned from.
        self._parts, self._together = take_apart(map_tensors(output, lambda _: torch.empty(0)))
        self._is_lone = isinstance(output, torch.Tensor) and self.num_computed == 1

    def computed_in(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of a result of this form that were computed."""
        parts = take_apart(output)[0]
        found = {number: parts[position] for position, number in self._computed}
        return tuple(found[number] for number in range(self.num_computed))

    def result(self, computed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """A result of this form."""
        if self._is_lone:
            return computed[0]
        parts = list(self._parts)
        for position, number in self._computed:
            parts[position] = computed[number]
        for position, number in self._passed:
            parts[position] = inputs[number]
        return self._together(parts)


class FlatModule(nn.Module):
    """The module with nothing but tensors as arguments, and a tuple of tensors as result.

    Args:
        request: What to make it of.
        args: Positional arguments of a call; all that is no tensor stays as it is here.
        kwargs: Its keyword arguments.

    Attributes:
        inputs: The tensors that it takes, in order.
        tensors: Those of the call, in the layouts that are built for.
        form: How the result is put together, once it was called.
    """

    def __init__(self, request: BuildRequest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = request.module
        self.training = False
        self.form: OutputForm | None = None
        self._call = request.forward
        self._num_args = len(args)
        bound = bind(request.graph.parameters, args, kwargs)
        positions = {leaf.path: place for place, leaf in enumerate(input_leaves(bound))}
        parts, self._together = take_apart(bound)
        self._positions = [positions[spec.path] for spec in request.graph.inputs]
        found = [parts[place] for place in self._positions]
        self.inputs = [
            FlatInput(
                path=spec.path,
                access_path=spec.access_path,
                layout=layout_of(tensor),
                is_on_cpu=tensor.device.type == "cpu" and request.device.type != "cpu",
            )
            for spec, tensor in zip(request.graph.inputs, found, strict=True)
        ]
        # A tensor in two places is two inputs, since calls to come may have two tensors there.
        self.tensors: tuple[torch.Tensor, ...] = tuple(
            one.fitted(tensor.detach().clone(), tensor.device) for one, tensor in zip(self.inputs, found, strict=True)
        )
        self._parts = parts

    def forget_call(self) -> None:
        """Let go of the tensors of the call that it was made of, for a module that stays."""
        self.tensors = ()
        for place in self._positions:
            self._parts[place] = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the module computes of these."""
        parts = list(self._parts)
        for place, tensor in zip(self._positions, tensors, strict=True):
            parts[place] = tensor
        bound = self._together(parts)
        names = list(bound)
        args = [bound[name] for name in names[: self._num_args]]
        output = self._call(*args, **{name: bound[name] for name in names[self._num_args :]})
        self.form = OutputForm(output, tensors)
        if not self.form.num_computed:
            raise TuningError("its result has no tensor that it computes")
        return self.form.computed_in(output)


def learned_form(request: BuildRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputForm:
    """How results are put together, from a call of the plain module with arguments that may be changed.

    Raises:
        TuningError: The module changes itself, or its result cannot be put together again.
    """
    bound = bind(request.graph.parameters, args, kwargs)
    found = {leaf.path: leaf.value for leaf in input_leaves(bound)}
    tensors = [found[spec.path] for spec in request.graph.inputs]
    before = [change_count(tensor) for tensor in tensors]
    state = _state_of(request.module)
    with torch.no_grad():
        output = request.forward(*args, **kwargs)
    for name, was in state.items():
        if _state_of(request.module).get(name) != was:
            raise TuningError(f"the module changes its own buffer `{name}` at each call, which would be lost")
    changed = [number for number, tensor in enumerate(tensors) if change_count(tensor) != before[number]]
    return OutputForm(output, tensors, changed)


def _state_of(module: nn.Module) -> dict[str, tuple[int, int | None]]:
    return {name: (id(buffer), change_count(buffer)) for name, buffer in module.named_buffers()}


class FlatCall:
    """Takes the module's own arguments, and returns what the module does, by what was built of its flat form.

    Args:
        request: What it was built of.
        inputs: The tensors that the build takes.
        run: The build.
        form: How results are put together; None, as for a saved archive: learned from the plain module at the first
            call.
        otherwise: Serves calls that the build is not for, of tensors on another device or with other constants; None:
            these are errors.
    """

    def __init__(
        self,
        request: BuildRequest,
        inputs: Sequence[FlatInput],
        run: Run,
        form: OutputForm | None,
        otherwise: Callable[..., Any] | None = None,
    ) -> None:
        self._inputs, self._run, self._form, self._otherwise = tuple(inputs), run, form, otherwise
        self._learn = functools.partial(learned_form, request)
        self._parameters, self._device = request.graph.parameters, _indexed(request.device)
        self._read = _Reader([one.path for one in inputs])
        self._constants = _Constants(request.graph)
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        bound = bind(self._parameters, args, kwargs)
        try:
            self._constants.check(bound)
            tensors = self._read(bound)
            fitted = [one.fitted(tensor, self._device) for one, tensor in zip(self._inputs, tensors, strict=True)]
        except (InputError, TuningError):
            if self._otherwise is None:
                raise
            return self._otherwise(*args, **kwargs)
        form = self._form
        if form is None:
            with self._lock:
                form = self._form = self._form or self._learn(*copy_arguments(args, kwargs))
        computed = self._run(list(fitted))  # a loader may empty the list
        if len(computed) != form.num_computed:
            raise TuningError(f"what was built returns {len(computed)} tensors, and the module {form.num_computed}")
        for number in form.changed:
            if fitted[number] is not tensors[number]:
                tensors[number].copy_(fitted[number])
        return form.result(computed, tensors)


def _indexed(device: torch.device) -> torch.device:
    """The device with its number, as tensors tell it."""
    if device.type == "cpu" or device.index is not None:
        return torch.device("cpu") if device.type == "cpu" else device
    return torch.device(device.type, torch.accelerator.current_device_index())


class _Reader:
    """Finds tensors among arguments by their paths."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._names = [str(path[0]) for path in paths] if all(len(path) == 1 for path in paths) else None
        self._getters: list[Callable[[Any], Any]] | None = None
        self._is_known = False

    def __call__(self, bound: Mapping[str, Any]) -> list[Any]:
        if self._names is not None:
            return [bound[name] for name in self._names]
        if not self._is_known:
            leaves = {leaf.path: leaf for leaf in input_leaves(bound)}
            getters = [_getter(bound, leaves[path]) for path in self._paths]
            self._getters = None if None in getters else [getter for getter in getters if getter is not None]
            self._is_known = True
        if self._getters is not None:
            return [getter(bound) for getter in self._getters]
        found = {leaf.path: leaf.value for leaf in input_leaves(bound)}
        return [found[path] for path in self._paths]


def _getter(bound: Mapping[str, Any], leaf: Leaf) -> Callable[[Any], Any] | None:
    """What goes to a leaf straight, a tenth of the time of taking all apart; None if parts are made when asked for."""
    steps: list[Callable[[Any], Any]] = []
    value: Any = bound
    for part in leaf.path:
        container = container_of(type(value))
        has_items = type(value) in MAPPINGS or (is_sequence_type(type(value)) and isinstance(part, int))
        if has_items or (container is not None and container.has_keys):
            steps.append(operator.itemgetter(part))
        elif isinstance(part, str):
            steps.append(operator.attrgetter(part))
        else:
            return None
        try:
            value = steps[-1](value)
        except (LookupError, AttributeError, TypeError):
            return None
    return (lambda start: _walked(start, steps)) if value is leaf.value else None


def _walked(value: Any, steps: Sequence[Callable[[Any], Any]]) -> Any:
    for step in steps:
        value = step(value)
    return value


def has_constants_of(graph: GraphSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments that are no tensors are those that a graph was recorded with."""
    try:
        _Constants(graph).check(bind(graph.parameters, args, kwargs))
    except TuningError:
        return False
    return True


class _Constants:
    """The arguments that are no tensors, which a build has inside it."""

    def __init__(self, graph: GraphSpec) -> None:
        self._specs = list(graph.others)
        self._read = _Reader([spec.path for spec in graph.others])
        self._known: list[Any] = [object()] * len(self._specs)

    def check(self, bound: Mapping[str, Any]) -> None:
        """Refuse other values, which are calls of the same graph where strict mode is off."""
        if not self._specs:
            return
        for number, value in enumerate(self._read(bound)):
            if value is self._known[number]:
                continue
            spec = self._specs[number]
            if scalar_text(value) != spec.value:
                raise TuningError(
                    f"`{spec.access_path}` is {scalar_text(value)} in this call, but what was built has {spec.value} "
                    "inside. Tune with config.strict_mode = True, which makes another graph of another value."
                )
            self._known[number] = value
