"""A benchmark folder: one function with the inputs of its real calls, for whoever writes another kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import Field, JsonValue

from perfladder.errors import InputError, RungError
from perfladder.files import make_empty_folder, write_atomically
from perfladder.functional.mode import CallTable, FunctionMode
from perfladder.functional.profiler import call_pairs, callable_of, module_of
from perfladder.functional.samples import Arguments, SampleStore
from perfladder.kernels.functions import function_named
from perfladder.kernels.optimizer import device_of
from perfladder.kernels.reference import CallSample, reference_of
from perfladder.kernels.runtime import Activation
from perfladder.kernels.signatures import CallSignature
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.target import LoadedTarget
from perfladder.tuning.correctness import TOLERANCES
from perfladder.user_code import consume

if TYPE_CHECKING:
    from torch import nn

TASK: Final = "task.json"
SAMPLES: Final = "samples.safetensors"
REFERENCE: Final = "reference.safetensors"
SCRIPT: Final = "bench.py"
CANDIDATE: Final = "candidate.py"

_STANDALONE: Final = Path(__file__).with_name("standalone_bench.py")


class TaskSample(Model):
    """Calls of one form, with the inputs of the first of them; nodes are as `bench.py` reads them."""

    label: str
    num_calls: int
    args: dict[str, JsonValue]
    kwargs: dict[str, JsonValue]
    output: dict[str, JsonValue]
    reference_dtype: str | None = Field(description="In which the reference was computed; None: as the function is.")
    changes_inputs: bool


class KernelTask(Model):
    """`task.json`: what another kernel is to do, and how exactly."""

    schema_version: int = SCHEMA_VERSION
    function: str
    device: str
    torch_version: str
    tolerances: dict[str, float] = Field(description="Largest accepted error, relative to the largest magnitude.")
    samples: list[TaskSample]


class ExportResult(Model):
    """What was written."""

    schema_version: int = SCHEMA_VERSION
    function: str
    folder: str
    samples: list[str] = Field(description="A line for each form of call.")
    num_calls: int
    left_out: str | None = Field(default=None, description="Which calls are not in the folder, and why.")


class ExportRequest(Model):
    """What to export of a capture, and where to."""

    capture: str
    folder: str
    function: str
    path: str | None = Field(default=None, description="Where the stage is on the target; None: where it was captured.")
    limit: int = Field(default=8, ge=1, description="Forms of call at most, those with most calls first.")


def export_benchmark(
    function: Callable[..., Any],
    data: Iterable[Arguments] | None,
    name: str,
    folder: str | Path,
    *,
    module: nn.Module | None = None,
    limit: int = 8,
) -> ExportResult:
    """Run a function once, and write the inputs of one function's calls inside a module, with what is right for them.

    Args:
        function: What to run, as in `KernelOptimizer.make_plan`.
        data: Arguments as (args, kwargs) pairs.
        name: The function whose calls are wanted, such as `linear` or `Tensor.matmul`.
        folder: Where to; it must not hold anything yet.
        module: Whose inside is looked at; by default the function itself, or the module it is a method of.
        limit: Forms of call at most, those with most calls first.

    Raises:
        InputError: There is no such function, or the folder holds something.
        RungError: The module makes no call of it whose inputs can be written.
    """
    if type(limit) is not int or limit < 1:
        raise InputError(f"limit: expected a whole number above 0, got {limit!r}.")
    root, run, calls = module_of(function, module), callable_of(function), call_pairs(data)

    def iterate() -> None:
        for args, kwargs in calls:
            consume(run(*args, **kwargs), lambda: 0)

    return _export(iterate, root, name, Path(folder), limit, device_of(root, calls))


def measure(loaded: LoadedTarget, request: ExportRequest) -> ExportResult:
    """The same for the calls of a capture, replayed on the loaded stage.

    Raises:
        CaptureError: The capture cannot be used.
        InputError: The stage is no module, there is no such function, or the folder holds something.
        RungError: The stage makes no call of it whose inputs can be written.
    """
    from perfladder.capturing.replay import Replay

    with Replay(loaded, Path(request.capture), path=request.path) as replay:
        if not replay.site.is_module:
            raise InputError(f"capture: {replay.manifest.stage} is no module, inside which calls could be seen.")

        def iterate() -> None:
            for call in replay.manifest.calls:
                replay.replay(call)

        root = replay.site.owner
        return _export(iterate, root, request.function, Path(request.folder), request.limit, loaded.device)


def _export(
    iterate: Callable[[], None], module: nn.Module, name: str, folder: Path, limit: int, device: torch.device
) -> ExportResult:
    function_named(name)
    make_empty_folder(folder)
    store = SampleStore(frozenset({name}))
    with torch.no_grad(), Activation(module, FunctionMode(CallTable(), store.take)):
        iterate()
    found = sorted(store.function_data().get(name, ()), key=lambda pair: -pair[0])
    written, reasons = _Written(), [left.reason for left in store.left_out().values()]
    samples: list[TaskSample] = []
    for count, arguments in found:
        if len(samples) == limit:
            reasons.append(f"more than {limit} forms of call (limit)")
            break
        try:
            samples.append(_sample(name, len(samples), count, CallSample.of_call(arguments), device, written))
        except _NotWritableError as error:
            reasons.append(str(error))
    if not samples:
        why = f" whose inputs can be written: {reasons[0]}" if reasons else ""
        raise RungError(f"The module makes no call of {name}{why}. `perfladder run` tells which functions it calls.")
    written.write(folder)
    task = KernelTask(
        function=name,
        device=str(device),
        torch_version=torch.__version__,
        tolerances=dict(TOLERANCES),
        samples=samples,
    )
    write_atomically(folder / SCRIPT, _STANDALONE.read_text(encoding="utf-8"))
    write_atomically(folder / CANDIDATE, _candidate(name))
    write_atomically(folder / TASK, task.model_dump_json(indent=1))
    return ExportResult(
        function=name,
        folder=str(folder),
        samples=[f"{sample.num_calls} x {sample.label}" for sample in samples],
        num_calls=sum(sample.num_calls for sample in samples),
        left_out="; ".join(dict.fromkeys(reasons)) or None,
    )


def _candidate(name: str) -> str:
    called = f"torch.nn.functional.{name}" if "." not in name else name.replace("Tensor.", "torch.Tensor.")
    return (
        f'"""Another kernel for {name}: run `python bench.py` to check and time it."""\n\n'
        "import torch\n\n\n"
        "def kernel(*args, **kwargs):\n"
        f"    return {called}(*args, **kwargs)\n"
    )


class _NotWritableError(Exception):
    """A value that the folder's file has no form for."""


class _Written:
    """Tensors of both files."""

    def __init__(self) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.inputs, folder / SAMPLES)
        save_file(self.outputs, folder / REFERENCE)


def _sample(
    name: str, number: int, count: int, sample: CallSample, device: torch.device, written: _Written
) -> TaskSample:
    signature = CallSignature.of((sample.args, sample.kwargs))
    if signature is None:
        raise _NotWritableError("the form of its arguments cannot be told")
    reference = reference_of(function_named(name), sample, device)
    with torch.no_grad():
        args, kwargs = sample.fresh()
        output = reference.call(*args, **kwargs)
    return TaskSample(
        label=signature.describe(),
        num_calls=count,
        args=_node(sample.args, f"{number}.args", written.inputs),
        kwargs=_node(sample.kwargs, f"{number}.kwargs", written.inputs),
        output=_node(output, f"{number}.output", written.outputs),
        reference_dtype=reference.dtype,
        changes_inputs=reference.changes_inputs,
    )


def _node(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, JsonValue]:
    """The form in which `bench.py` reads a value; tensors go to a file, as the memory that they reach over."""
    if isinstance(value, torch.Tensor):
        flat = value.detach()
        reach = 1 + sum((size - 1) * step for size, step in zip(flat.shape, flat.stride(), strict=True))
        tensors[name] = flat.as_strided((reach if flat.numel() else 0,), (1,)).cpu().clone()
        return {"kind": "tensor", "name": name, "shape": list(flat.shape), "strides": list(flat.stride())}
    if isinstance(value, Mapping):
        return {
            "kind": "dict",
            "items": {str(key): _node(item, f"{name}.{key}", tensors) for key, item in value.items()},
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        items: list[JsonValue] = [_node(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, torch.dtype):
        return {"kind": "dtype", "value": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"kind": "value", "value": value}
    raise _NotWritableError(f"a {type(value).__name__} cannot be written")
