"""Which modules of an object are worth tuning: what runs, how often, and for how long."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from perfladder.errors import InputError
from perfladder.in_place import device_of
from perfladder.instrument import Observer, Site, instrument
from perfladder.object_parts import attribute_at
from perfladder.profiling.discover import Part, find_parts
from perfladder.target import resolve_device
from perfladder.timing.timer import Clock, RunTiming, StageTimer, resolve_device_times, timing_event
from perfladder.tuning.dataset import Arguments, calls_of, cycled
from perfladder.user_code import consume, user_code

if TYPE_CHECKING:
    import torch
    from torch import nn

_NS_PER_MS: Final = 1e6


@dataclass(eq=False)
class ModuleInfo:
    """One module that ran.

    Attributes:
        module: The module.
        name: Its full path, or for the object itself the name of its class.
        object_path: The path on the object; empty for the object itself.
        parent: What holds it: a module, a list, a dict or an object; None for the object itself.
        depth: Steps of the path; 0 for the object itself.
        execution_count: Calls in all measured iterations.
        total_execution_time: Of these calls together, in ms: on the device where there is one, else on the host.
        input_types: Type of each argument of its first call, by position or name.
        output_types: Types of what its first call returned.
        inspected: What was called to inspect it.
    """

    module: nn.Module = field(repr=False)
    name: str
    object_path: str
    parent: Any = field(repr=False)
    depth: int
    execution_count: int = 0
    total_execution_time: float = 0.0
    input_types: dict[str, str] = field(default_factory=dict)
    output_types: list[str] = field(default_factory=list)
    inspected: Any = field(default=None, repr=False)

    @property
    def forward_called(self) -> bool:
        """Whether it ran at all."""
        return self.execution_count > 0

    @property
    def module_type(self) -> str:
        """Qualified class name."""
        return f"{type(self.module).__module__}.{type(self.module).__qualname__}"

    @property
    def average_execution_time(self) -> float:
        """Of one call, in ms."""
        return self.total_execution_time / self.execution_count if self.execution_count else 0.0

    @property
    def num_parameters(self) -> int:
        """Numbers in its parameters, each tensor once."""
        return sum(weight.numel() for weight in self.module.parameters())

    @property
    def num_layers(self) -> int:
        """Modules inside that have no modules inside."""
        return num_layers(self.module)

    @property
    def precisions(self) -> list[str]:
        """Dtypes of its parameters and floating-point buffers."""
        return precisions(self.module)


def num_layers(module: nn.Module) -> int:
    """Modules inside that have no modules inside."""
    return sum(not list(part.children()) for part in module.modules())


def precisions(module: nn.Module) -> list[str]:
    """Dtypes of a module's parameters and floating-point buffers."""
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


class InspectedModulesInfo:
    """The topmost modules that ran.

    Attributes:
        total_execution_time: Of all measured iterations, end to end, in ms.
        number_of_batches: Measured iterations.
    """

    def __init__(self, total_execution_time: float, number_of_batches: int) -> None:
        self.total_execution_time = total_execution_time
        self.number_of_batches = number_of_batches
        self._modules: dict[str, ModuleInfo] = {}

    def add_module(self, info: ModuleInfo) -> None:
        """Add a module.

        Raises:
            InputError: One of that path is there already.
        """
        if info.object_path in self._modules:
            raise InputError(f"A module at {info.object_path!r} is listed already.")
        self._modules[info.object_path] = info

    def ratio(self, info: ModuleInfo) -> float:
        """The module's part of the whole time."""
        return info.total_execution_time / self.total_execution_time if self.total_execution_time else 0.0

    def get_modules(
        self,
        min_execution_ratio: float | None = None,
        limit: int | None = None,
        *,
        min_execution_percentage: float | None = None,
    ) -> list[ModuleInfo]:
        """The modules that took most time first.

        Args:
            min_execution_ratio: Leave out those below this part of the whole time, from 0 to 1.
            limit: At most so many.
            min_execution_percentage: Another name of `min_execution_ratio`: a fraction from 0 to 1 too.

        Raises:
            InputError: A value is out of its range, or both names are given.
        """
        if min_execution_ratio is not None and min_execution_percentage is not None:
            raise InputError("min_execution_ratio and min_execution_percentage are one value; give one of them.")
        least = min_execution_ratio if min_execution_percentage is None else min_execution_percentage
        if least is not None and (isinstance(least, bool) or not 0 <= least <= 1):
            raise InputError(f"min_execution_ratio: expected a fraction from 0 to 1, got {least!r}.")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InputError(f"limit: expected a whole number from 1 up, got {limit!r}.")
        found = sorted(self._modules.values(), key=lambda info: (-info.total_execution_time, info.name))
        return [info for info in found if least is None or self.ratio(info) >= least][:limit]

    def describe(self) -> None:
        """Print the modules as a table."""
        from rich.console import Console
        from rich.table import Table

        mean_ms = self.total_execution_time / max(self.number_of_batches, 1)
        table = Table(title=f"{self.number_of_batches} iterations, {mean_ms:.2f} ms each")
        for name in ("module", "type", "calls", "ms a call", "share", "layers", "parameters", "precision"):
            table.add_column(
                name, justify="left" if name in ("module", "type", "precision") else "right", overflow="fold"
            )
        for info in self.get_modules():
            table.add_row(
                info.name,
                type(info.module).__name__,
                str(info.execution_count),
                f"{info.average_execution_time:.3f}",
                f"{self.ratio(info):.1%}",
                str(info.num_layers),
                f"{info.num_parameters:,}",
                ", ".join(info.precisions),
            )
        console = Console(markup=False)
        if not console.is_terminal:
            console.width = 10_000  # a file or a log has no width, and a path that is cut off could not be copied
        console.print(table)


def inspect(
    obj: Any,
    dataset: Any,
    inference_function: Callable[..., Any] | None = None,
    number_of_iterations: int = 10,
    warmup_iterations: int = 5,
    min_depth: int = 0,
    max_depth: int = 5,
    *,
    clock: Clock = time.perf_counter_ns,
) -> InspectedModulesInfo:
    """Run an object and find its topmost modules that ran, with their time.

    Modules are looked for in attributes (private ones too), lists, tuples, dicts, plain objects inside, and owners of
    bound methods. A module inside another one that ran is not listed, unless the outer one is above `min_depth`. Where
    one module is reachable by several paths, the first counts.

    Args:
        obj: A module, or any object that holds modules.
        dataset: Samples, as `perfladder.tuning.dataset.calls_of` takes them; an iteration is a call of batch size 1.
        inference_function: What to call instead of `obj`, with the same arguments.
        number_of_iterations: Measured ones; samples come again where there are fewer.
        warmup_iterations: Before them.
        min_depth: Least number of steps in a listed module's path; 0 is the object itself.
        max_depth: Most steps.
        clock: Nanoseconds.

    Raises:
        InputError: A value is out of its range, the dataset has a wrong form, or the object holds no module that runs.
        WorkloadError: The object raised.
    """
    for name, value, least in (
        ("number_of_iterations", number_of_iterations, 1),
        ("warmup_iterations", warmup_iterations, 0),
        ("min_depth", min_depth, 0),
        ("max_depth", max_depth, min_depth),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}: expected a whole number from {least} up, got {value!r}.")
    function = obj if inference_function is None else inference_function
    if not callable(function):
        raise InputError(f"A {type(obj).__name__} cannot be called; give an inference_function.")
    calls = list(calls_of(dataset, 1, max_batches=max(number_of_iterations, warmup_iterations, 1)))
    runner = Runner(resolve_device(device_of(_root(obj))), function, clock=clock)
    depths = range(min_depth, max_depth + 1)
    found = inspect_runs(obj, runner, calls, depths, measured=number_of_iterations, warmup=warmup_iterations)
    for info in found.get_modules():
        info.inspected = function
    return found


def inspect_runs(
    obj: Any, runner: Runner, calls: Sequence[Arguments], depths: range, *, measured: int, warmup: int
) -> InspectedModulesInfo:
    """Find the topmost modules that ran, as `inspect` does.

    Args:
        obj: What holds the modules.
        runner: Makes a call.
        calls: The calls, in turn.
        depths: Which numbers of steps a module's path may have.
        measured: Measured calls.
        warmup: Calls before them; there is one at least, to see what runs.
    """
    found = _topmost([part for part in _parts(obj) if _depth(part.path) in depths], runner, calls[0])
    for call in cycled(calls, max(warmup - 1, 0)):
        runner(call)
    return _measured(obj, found, runner, list(cycled(calls, measured)))


def _parts(obj: Any) -> list[Part]:
    """Modules of the object; of a bound method, those of its owner."""
    root = _root(obj)
    found = {id(part.module): part for part in find_parts(root)}
    own = vars(root) if hasattr(root, "__dict__") else {}
    for name, value in own.items():
        if isinstance(value, types.MethodType) and value.__self__ is not root:
            for part in find_parts(value.__self__):
                path = ".".join(filter(None, (name, "__self__", part.path)))
                found.setdefault(id(part.module), replace(part, path=path))
    return list(found.values())


def _root(obj: Any) -> Any:
    """What holds the modules: the owner of a bound method, else the object."""
    return obj.__self__ if isinstance(obj, types.MethodType) else obj


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


@dataclass(eq=False)
class Runner:
    """One way to run the work: what to do before a call, outside the measured part, and the call itself."""

    device: torch.device
    function: Callable[..., Any]
    prepare: Callable[[], object] = lambda: None
    clock: Clock = time.perf_counter_ns

    def __call__(self, call: Arguments) -> RunTiming:
        """Run once without gradients, consume what is streamed, and wait for the device."""
        import torch

        args, kwargs = call
        self.prepare()
        self._wait()
        origin = None
        if self.device.type != "cpu":
            origin = timing_event(self.device)
            origin.record()
        start = self.clock()
        with user_code("The object"), torch.no_grad():
            consume(self.function(*args, **kwargs), self.clock)
        self._wait()
        return RunTiming(start, self.clock(), [], [], origin)

    def _wait(self) -> None:
        import torch

        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class _FirstCalls(Observer):
    """The types that each site's first call takes and returns."""

    def __init__(self) -> None:
        self.inputs: dict[str, dict[str, str]] = {}
        self.outputs: dict[str, list[str]] = {}

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [*((str(index), value) for index, value in enumerate(args)), *kwargs.items()]
        self.inputs.setdefault(site.path, {name: type(value).__name__ for name, value in named})

    def leave(self, site: Site, token: None, result: Any) -> None:
        results = result if isinstance(result, (list, tuple)) else [result]
        self.outputs.setdefault(site.path, [type(value).__name__ for value in results])


@dataclass(frozen=True, eq=False)
class _Found:
    parts: list[Part]
    first: _FirstCalls


def _topmost(parts: list[Part], run: Runner, call: Arguments) -> _Found:
    """One run tells which modules run at all; of these, those that lie in no other one that does."""
    first = _FirstCalls()
    with instrument([Site(part.path, part.module) for part in parts], first):
        run(call)
    called = [part for part in parts if part.path in first.inputs]
    if not called:
        raise InputError("No module of the object ran. Give the object whose modules the function uses.")
    paths = {part.path for part in called}
    return _Found([part for part in called if not any(outer in paths for outer in _outer(part.path))], first)


def _outer(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _measured(obj: Any, found: _Found, run: Runner, calls: Iterable[Arguments]) -> InspectedModulesInfo:
    timer = StageTimer(run.clock, run.device)
    infos = {part.path: _info(obj, part, found.first) for part in found.parts}
    total_ms, count = 0.0, 0
    for call in calls:
        with instrument([Site(part.path, part.module) for part in found.parts], timer):
            timing = run(call)
        timing.calls = timer.take()
        on_device = timing.origin is not None
        if on_device:
            resolve_device_times(timing)
        total_ms, count = total_ms + timing.wall_ms, count + 1
        for span in timing.calls:
            info = infos[span.site.path]
            info.execution_count += not span.is_item
            info.total_execution_time += span.device_ms if on_device else span.duration_ns / _NS_PER_MS
    result = InspectedModulesInfo(total_ms, count)
    for info in infos.values():
        result.add_module(info)
    return result


def _info(obj: Any, part: Part, first: _FirstCalls) -> ModuleInfo:
    parent = attribute_at(_root(obj), part.path.rpartition(".")[0], field_name="module") if part.path else None
    return ModuleInfo(
        module=part.module,
        name=part.name,
        object_path=part.path,
        parent=parent,
        depth=_depth(part.path),
        input_types=first.inputs[part.path],
        output_types=first.outputs.get(part.path, []),
    )
