"""The tables of the kernel profiler: one row a kernel, and one row a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfladder.functional.compiled import region_name
from perfladder.functional.launch_sites import name_launch
from perfladder.functional.names import NO_CALL
from perfladder.functional.samples import SAMPLING_KIND, FunctionData, num_bytes, tensors_in
from perfladder.functional.sites import ModuleSites
from perfladder.trace.kernels import KernelTable
from perfladder.trace.model import BoolArray, IntArray

if TYPE_CHECKING:
    from pandas import DataFrame

NO_OPERATOR: Final = "(none)"
"""Operator of a kernel that no operator launched, such as one of a program's own Triton functions."""
PROFILE_COLUMNS: Final = ("module_name", "module", "function_name", "op", "kernel", "kernel_us")
SUMMARY_COLUMNS: Final = (
    "function_name",
    "calls",
    "num_distinct_samples",
    "num_modules",
    "time_spent_us",
    "time_spent_pct",
    "tensor_size_MB",
)
_BYTES_PER_MB: Final = 2**20
_NS_PER_US: Final = 1e3


class Rows:
    """The kernels of a table that belong to a module of the hierarchy, with their names."""

    def __init__(self, table: KernelTable, sites: ModuleSites) -> None:
        self._table = table
        self._sites = sites
        self._opaque = sites.opaque_names
        own = set(sites.labels.values())
        self._module_of = [label.name if label and label in own else None for label in table.labels]
        is_copying = [label is not None and label.kind == SAMPLING_KIND for label in table.labels]
        region = self._name_ids(table.region)
        # The last entry is for what belongs to no region, whose index is -1.
        is_own = np.array([*(name is not None for name in self._module_of), False])[region]
        is_outside = ~(is_own | np.array([*is_copying, False])[region])
        self._chosen = np.flatnonzero(is_own)
        self.total_us, self.outside_us = self._sum_us(is_own), self._sum_us(is_outside)

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self._chosen)

    @property
    def attributed_us(self) -> float:
        """Time of those that a named call launched, a compiled region, or a line of the program."""
        named = (self._table.function[self._chosen] >= 0) | (self._table.launch_site[self._chosen] >= 0)
        opaque = np.array([name in self._opaque for name in self._module_names()], bool)
        return float(self._table.duration_ns[self._chosen[named | opaque]].sum()) / _NS_PER_US

    def _sum_us(self, wanted: BoolArray) -> float:
        return float(self._table.duration_ns[wanted].sum()) / _NS_PER_US

    def _name_ids(self, positions: IntArray) -> IntArray:
        """Return the index of each span's name; -1 for none."""
        names = self._table.trace.forest.name_id
        return np.where(positions >= 0, names[np.maximum(positions, 0)], -1) if len(names) else positions

    def _module_names(self) -> list[str]:
        return [self._module_of[index] or "" for index in self._name_ids(self._table.region)[self._chosen]]

    def _names(self, positions: IntArray, absent: str) -> list[str]:
        names = self._table.trace.names
        return [names[index] if index >= 0 else absent for index in self._name_ids(positions)[self._chosen]]

    def _label_names(self, positions: IntArray) -> list[str]:
        labels = [self._table.labels[i] if i >= 0 else None for i in self._name_ids(positions)[self._chosen]]
        return [label.name if label else NO_CALL for label in labels]

    def frame(self) -> DataFrame:
        """Return them as a frame of `PROFILE_COLUMNS`, in the order of their start."""
        import pandas as pd

        table, chosen, trace = self._table, self._chosen, self._table.trace
        event = table.event[chosen]
        kernels = [trace.names[index] for index in trace.name_id[event]]
        inner_operators = self._names(table.operator, NO_OPERATOR)
        modules, operators = self._module_names(), self._names(table.outer_operator, NO_OPERATOR)
        if table.is_host:  # the runtime of a compiled function is an entry, though no operator that code calls
            pairs = zip(operators, inner_operators, strict=True)
            operators = [inner if outer == NO_OPERATOR else outer for outer, inner in pairs]
        functions = self._label_names(table.function)
        launch_sites = self._label_names(table.launch_site)
        for index, name in enumerate(modules):
            if name in self._opaque and functions[index] == NO_CALL:
                operators[index] = inner_operators[index]
                functions[index] = region_name(name, kernels[index], operators[index])
            elif functions[index] == NO_CALL and launch_sites[index] != NO_CALL:
                functions[index] = name_launch(kernels[index], launch_sites[index])
        frame = pd.DataFrame(
            {
                "module_name": pd.Series(modules, dtype="str"),
                "module": pd.Series(_objects([self._sites.modules[name] for name in modules])),
                "function_name": pd.Series(functions, dtype="str"),
                "op": pd.Series(operators, dtype="str"),
                "kernel": pd.Series(kernels, dtype="str"),
                "kernel_us": table.duration_ns[chosen] / _NS_PER_US,
            }
        )
        return frame.iloc[np.argsort(trace.start_ns[event], kind="stable")].reset_index(drop=True)


def _objects(values: list[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Return an array of these very objects; numpy would open those that are sequences, as `nn.Sequential` is."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def summarize_functions(profile: DataFrame, data: FunctionData, top_k: int) -> DataFrame:
    """Return one row a function, those that took most time first; see `SUMMARY_COLUMNS`.

    Raises:
        ValueError: `top_k` is not positive, or the frame is none of `profile()`.
    """
    import pandas as pd

    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k <= 0:
        raise ValueError(f"top_k must be 1 or more, not {top_k!r}.")
    missing = [column for column in PROFILE_COLUMNS if column not in getattr(profile, "columns", ())]
    if missing:
        raise ValueError(f"Expected the frame that profile() returns; it has no column {', '.join(missing)}.")
    if not isinstance(data, Mapping):
        raise ValueError(f"Expected the samples that profile() returns, a dict by function, not {type(data).__name__}.")
    whole_us = float(profile["kernel_us"].sum())
    rows = [
        _summary(str(name), group, data.get(str(name)), whole_us) for name, group in profile.groupby("function_name")
    ]
    rows.sort(key=lambda row: (-row["time_spent_us"], row["function_name"]))
    return pd.DataFrame(rows[:top_k], columns=list(SUMMARY_COLUMNS))


def _summary(name: str, group: DataFrame, samples: list[Any] | None, whole_us: float) -> dict[str, Any]:
    samples = samples or None  # all of them may have been left out
    spent_us, absent = float(group["kernel_us"].sum()), float("nan")
    sizes = [sum(num_bytes(tensor) for tensor in tensors_in(sample)) for _, sample in samples or []]
    return {
        "function_name": name,
        "calls": absent if samples is None else sum(count for count, _ in samples),
        "num_distinct_samples": absent if samples is None else len(samples),
        "num_modules": len({id(module) for module in group["module"]}),
        "time_spent_us": spent_us,
        "time_spent_pct": 100 * spent_us / whole_us if whole_us else 0.0,
        "tensor_size_MB": absent if samples is None else sum(sizes) / _BYTES_PER_MB,
    }
