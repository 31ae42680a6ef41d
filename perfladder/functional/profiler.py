"""`ModuleFunctionKernelProfiler`: which kernels the named calls of each module launch, and with which inputs."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import Field
from torch import nn

from perfladder.errors import RungError
from perfladder.functional.frames import Rows, summarize_functions
from perfladder.functional.samples import Arguments, FunctionData, LeftOut, SampleStore
from perfladder.functional.sites import ModuleSites, find_module_sites
from perfladder.functional.window import record_marked
from perfladder.models import Model, ResultWarning
from perfladder.profiling.api import late_bound
from perfladder.profiling.warnings import ProfileWarningCode, trace_warnings, warn
from perfladder.profiling.window import check_no_profiler
from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace
from perfladder.user_code import consume

if TYPE_CHECKING:
    from pandas import DataFrame

_PLACES: Final = ("device", "cpu")


class Coverage(Model):
    """How much of a profile could be attributed; times are sums over kernels, or over operators on a CPU."""

    is_host: bool = Field(description="Whether rows are operators by self time, since no device worked.")
    total_us: float = Field(description="Time of all rows: what the module and everything inside it launched.")
    attributed_share: float = Field(description="The part of it that a named call or a compiled region launched.")
    outside_us: float = Field(description="Time of what was launched outside the module; it has no row.")
    analysis_s: float = Field(description="How long reading and attributing the trace took.")
    warnings: list[ResultWarning] = Field(default_factory=list)


class ModuleFunctionKernelProfiler:
    """Shows which kernels each named call of each module launches, and keeps the calls' distinct inputs.

    Calls of `torch.nn.functional` are named as there (`linear`), others with where they are from (`Tensor.matmul`,
    `torch.softmax`); what no call launched has the name `(none)`. Without a device, operators by their self time stand
    in for kernels. See `docs/kernels.md`.

    Args:
        function_names: Calls whose inputs are kept: None for all of `torch.nn.functional`, an empty set for none. Rows
            of the profile do not depend on it.
        samples_on: Where inputs are kept: `device` (where they were), `cpu`, or a folder, for files that vanish with
            their tensors.
        sample_budget_bytes: How much the kept copies may hold together; what would be more is left out, with a warning.

    Attributes:
        coverage: How much of the last profile could be attributed, and what to know about it.

    Raises:
        ValueError: The names are one text, the budget is negative, or `samples_on` is no folder.
    """

    def __init__(
        self,
        function_names: Collection[str] | None = None,
        *,
        samples_on: str | Path = "device",
        sample_budget_bytes: int | None = None,
    ) -> None:
        if isinstance(function_names, str):
            raise ValueError(f"function_names: expected a set such as {{{function_names!r}}}, not one text.")
        if samples_on not in _PLACES and not Path(samples_on).is_dir():
            raise ValueError(f"samples_on: expected 'device', 'cpu' or a folder; there is no folder {samples_on}.")
        if sample_budget_bytes is not None and sample_budget_bytes < 0:
            raise ValueError(f"sample_budget_bytes must be 0 or more, not {sample_budget_bytes}.")
        if function_names is not None and not all(isinstance(name, str) for name in function_names):
            raise ValueError("function_names: expected texts such as 'linear' or 'Tensor.matmul'.")
        self.function_names = None if function_names is None else frozenset(function_names)
        self.coverage: Coverage | None = None
        self._samples_on = samples_on
        self._sample_budget_bytes = sample_budget_bytes
        self._function_data: FunctionData = {}

    def profile(
        self,
        function: Callable[..., Any],
        data: Iterable[Arguments] | None = None,
        *,
        module: nn.Module | None = None,
        warmup_iterations: int = 3,
    ) -> tuple[DataFrame, FunctionData]:
        """Run a function, first unobserved, then once more under the profiler; all without gradients.

        Samples of the profile before are released: its `function_data` is emptied.

        Args:
            function: What to run: a module, or anything that calls `module`.
            data: Arguments as (args, kwargs) pairs; each iteration calls the function with all of them in turn. None
                is one call without arguments.
            module: The outermost module to observe; by default the function itself, or the module it is a method of.
            warmup_iterations: Unobserved iterations before.

        Returns:
            One row a kernel (`module_name`, `module`, `function_name`, `op`, `kernel`, `kernel_us`), in the order of
            their start, and for each function (number of calls, (args, kwargs)) of its distinct inputs.

        Raises:
            ValueError: No module is given or found, the data are no such pairs, or the count is negative.
            RungError: Another torch profiler is active, or nothing was launched inside the module.
        """
        root = module_of(function, module)
        calls = call_pairs(data)
        if isinstance(warmup_iterations, bool) or not isinstance(warmup_iterations, int) or warmup_iterations < 0:
            raise ValueError(f"warmup_iterations must be 0 or more, not {warmup_iterations!r}.")
        check_no_profiler()
        self._function_data.clear()
        self.coverage = None
        run = functools.partial(_iterate, callable_of(function), calls)
        store = SampleStore(self.function_names, self._samples_on, self._sample_budget_bytes)
        sites = find_module_sites(root)
        with torch.no_grad():
            for _ in range(warmup_iterations):
                run()
            with tempfile.TemporaryDirectory(prefix="perfladder-") as folder:
                trace, warnings = record_marked(Path(folder) / "trace.json", sites, run, on_call=store.take)
        frame = self._attribute(trace, sites, [*warnings, *_left_out_warnings(store.left_out())])
        self._function_data = store.function_data()
        return frame, self._function_data

    def _attribute(self, trace: Trace, sites: ModuleSites, warnings: list[ResultWarning]) -> DataFrame:
        start = time.perf_counter()
        table = list_kernels(trace, attribute(trace))
        rows = Rows(table, sites)
        if not rows.num_rows:
            what = "operator ran" if table.is_host else "kernel was launched"
            raise RungError(
                f"No {what} inside the module ({type(next(iter(sites.modules.values()))).__name__}). Check that the "
                "function calls this very module, and calls it rather than its forward()."
            )
        frame = rows.frame()
        self.coverage = Coverage(
            is_host=table.is_host,
            total_us=rows.total_us,
            attributed_share=rows.attributed_us / max(rows.total_us, 1e-9),
            outside_us=rows.outside_us,
            analysis_s=round(time.perf_counter() - start, 3),
            warnings=[*warnings, *trace_warnings(trace.warnings)],
        )
        return frame

    def describe_results(self, profiling_df: DataFrame, function_data: FunctionData, top_k: int = 10) -> DataFrame:
        """Return one row a function: how often, with how many inputs, from how many modules, for how long.

        Args:
            profiling_df: The frame that `profile()` returned.
            function_data: The samples that it returned.
            top_k: How many functions, those that took most time first.

        Returns:
            `function_name`, `calls`, `num_distinct_samples`, `num_modules`, `time_spent_us` (without functions called
            inside), `time_spent_pct` (of all rows, also of functions left out here), `tensor_size_MB` (all tensors of
            the distinct samples, in 2**20 bytes). NaN where no inputs were kept.

        Raises:
            ValueError: `top_k` is not positive, or these are not what `profile()` returned.
        """
        return summarize_functions(profiling_df, function_data, top_k)


def module_of(function: Any, module: nn.Module | None) -> nn.Module:
    """The module to look at: the one that is given, the function itself, or the module it is a method of.

    Raises:
        ValueError: There is none.
    """
    if not callable(function):
        raise ValueError(f"Cannot profile a {type(function).__name__}: it cannot be called.")
    candidates = [module] if module is not None else [function, getattr(function, "__self__", None)]
    for candidate in candidates:
        if isinstance(candidate, nn.Module):
            return candidate
    if module is not None:
        raise ValueError(f"module: expected a torch.nn.Module, not a {type(module).__name__}.")
    raise ValueError(
        f"Cannot tell which module to observe: a {type(function).__name__} is no torch.nn.Module. Give the module that "
        "it calls, as in profile(function, module=pipe.unet)."
    )


def call_pairs(data: Iterable[Any] | None) -> list[Arguments]:
    """Arguments of calls as pairs; None is one call without any.

    Raises:
        ValueError: They are no such pairs, or there are none.
    """
    if data is None:
        return [((), {})]
    expected = "expected a list of (args, kwargs) pairs, such as [((x,), {})]"
    if isinstance(data, (str, bytes, Mapping, torch.Tensor)) or not isinstance(data, Iterable):
        raise ValueError(f"data: {expected}, not a {type(data).__name__}.")
    pairs = []
    for index, item in enumerate(data):
        is_pair = isinstance(item, (list, tuple)) and len(item) == 2
        if not is_pair or not isinstance(item[0], (list, tuple)) or not isinstance(item[1], Mapping):
            raise ValueError(f"data[{index}]: {expected}; this is a {type(item).__name__} of another form.")
        if not all(isinstance(name, str) for name in item[1]):
            raise ValueError(f"data[{index}]: keyword arguments have names that are texts.")
        pairs.append((tuple(item[0]), dict(item[1])))
    if not pairs:
        raise ValueError("data is empty. Leave it out to call the function without arguments.")
    return pairs


def callable_of(function: Any) -> Callable[..., Any]:
    """Return what to call; a module's own `forward` is called as the module, since its hooks see nothing else."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__name__", "") == "forward":
        return owner
    return late_bound(function)


def _iterate(function: Callable[..., Any], calls: list[Arguments]) -> None:
    """Make all calls, consume what they stream, and wait for the device."""
    for args, kwargs in calls:
        consume(function(*args, **kwargs), time.perf_counter_ns)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _left_out_warnings(left_out: dict[str, LeftOut]) -> list[ResultWarning]:
    return [
        warn(
            ProfileWarningCode.SAMPLES_LEFT_OUT,
            f"Of {name!r}, {missing.num_samples} distinct inputs ({missing.num_calls} calls) were not kept: "
            f"{missing.reason}.",
        )
        for name, missing in left_out.items()
    ]
