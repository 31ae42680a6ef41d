"""Check and time another kernel for one function, with torch and safetensors alone.

Run it in its folder, beside task.json, samples.safetensors and reference.safetensors:

    python bench.py [candidate.py]

A candidate is a Python file with a function `kernel`, which takes what the function takes and returns what it returns.
It is right if, for every sample and for the same samples with their numbers moved around, its output has the form of
the function's and is within the tolerance of its dtype, and if it leaves its inputs as the function does.
The exit code is 0 if it is right, and 1 if not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

PAIRS, WARMUPS, RESAMPLES = 20, 5, 2000
SHORT_MS, MAX_REPEATS = 0.2, 100
"""Shorter calls are made several times in one timing."""
MAX_ERROR = 4000
"""Characters of an error that are told."""


# --- the task


class Task:
    """The function, its samples, and what is right for them."""

    def __init__(self, folder: Path) -> None:
        self.facts = json.loads((folder / "task.json").read_text())
        self.device = torch.device(self.facts["device"])
        self.inputs = load_file(folder / "samples.safetensors")
        self.outputs = load_file(folder / "reference.safetensors")
        self.samples: list[dict[str, Any]] = self.facts["samples"]
        self.function = find(self.facts["function"])

    def arguments(self, sample: dict[str, Any]) -> tuple[Any, Any]:
        """The sample's arguments, in new memory."""
        return self.value(sample["args"], self.inputs), self.value(sample["kwargs"], self.inputs)

    def reference(self, sample: dict[str, Any]) -> Any:
        """What is right for it."""
        return self.value(sample["output"], self.outputs)

    def value(self, node: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        """What a node of task.json stands for."""
        kind = node["kind"]
        if kind == "tensor":
            flat = tensors[node["name"]].to(self.device, copy=True)
            return flat.as_strided(node["shape"], node["strides"])
        if kind in ("list", "tuple"):
            items = [self.value(item, tensors) for item in node["items"]]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {name: self.value(item, tensors) for name, item in node["items"].items()}
        return getattr(torch, node["value"]) if kind == "dtype" else node["value"]


def find(name: str) -> Callable[..., Any]:
    """The function of that name: `linear`, `torch.bmm`, `Tensor.matmul`."""
    owner, _, attribute = name.rpartition(".")
    places = {"": torch.nn.functional, "torch": torch, "Tensor": torch.Tensor}
    found: Callable[..., Any] = getattr(places[owner], attribute)
    return found


def load_candidate(path: Path) -> Callable[..., Any]:
    """Import the file, and return its `kernel`."""
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, "kernel", None)):
        raise TypeError(f"{path.name} has no function `kernel`")
    kernel: Callable[..., Any] = module.kernel
    return kernel


# --- is it right?


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return {name: mapped(item, change) for name, item in value.items()} if isinstance(value, dict) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a structure, in order."""
    found: list[torch.Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def moved(value: Any) -> Any:
    """Other numbers of the same kind: those of each tensor, one place further."""
    return mapped(value, lambda t: t.copy_(t.clone().flatten().roll(1).view(t.shape)) if is_moved(t) else t)


def is_moved(tensor: torch.Tensor) -> bool:
    """Not integers, which may be indices; nor tensors whose elements share memory."""
    return tensor.is_floating_point() and all(
        step > 0 or size == 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def precise(task: Task, arguments: tuple[Any, Any]) -> Any:
    """What the function gives in a higher precision, where it has that, in the dtypes that it gives otherwise."""
    usual = [tensor.dtype for tensor in tensors_in(task.function(*arguments[0], **arguments[1]))]
    for dtype in (torch.float64, torch.float32):
        try:
            output = task.function(*raised(arguments[0], dtype), **raised(arguments[1], dtype))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue
        dtypes = iter(usual)
        return mapped(output, lambda tensor: tensor.to(next(dtypes)))  # noqa: B023
    return task.function(*arguments[0], **arguments[1])


def raised(value: Any, dtype: torch.dtype) -> Any:
    """The same with tensors of floating point in another dtype."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def difference(expected: Any, found: Any, tolerances: dict[str, float]) -> tuple[float, str | None]:
    """The largest error relative to the largest value, and why that is wrong."""
    left, right = tensors_in(expected), tensors_in(found)
    if len(left) != len(right) or type(expected) is not type(found):
        forms = [f"{type(value).__name__} with {len(own)} tensors" for value, own in ((found, right), (expected, left))]
        return 0.0, f"the output is a {forms[0]}, not a {forms[1]}"
    worst = 0.0
    for wanted, got in zip(left, right, strict=True):
        if (wanted.dtype, wanted.shape, wanted.device.type) != (got.dtype, got.shape, got.device.type):
            forms = [f"{t.dtype} {list(t.shape)} on {t.device.type}" for t in (got, wanted)]
            return worst, f"the output is {forms[0]}, not {forms[1]}"
        if not (wanted.is_floating_point() or wanted.is_complex()):
            if not torch.equal(wanted, got):
                return worst, f"{int((wanted != got).sum())} of {wanted.numel()} values differ"
            continue
        kind = torch.complex128 if wanted.is_complex() else torch.float64
        a, b = wanted.to(kind), got.to(kind)
        is_same = (a == b) | (a.isnan() & b.isnan())
        if bool((~(a.isfinite() & b.isfinite()) & ~is_same).any()):
            return worst, "values are NaN or infinite on one side only"
        error = float(torch.where(is_same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0
        scale = float(torch.where(a.isfinite(), a.abs(), 0.0).max()) if a.numel() else 0.0
        worst = max(worst, error / (scale or 1.0))
        tolerance = tolerances.get(str(wanted.dtype).removeprefix("torch."), 0.0)
        if error / (scale or 1.0) > tolerance:
            return worst, f"largest error {error:.3g} is {worst:.3g} of the largest value; {tolerance:g} is accepted"
    return worst, None


def check(task: Task, sample: dict[str, Any], kernel: Callable[..., Any]) -> tuple[float, str | None]:
    """Run a sample, and then the same memory with other numbers in it."""
    tolerances = task.facts["tolerances"]
    arguments, after = task.arguments(sample), task.arguments(sample)
    torch.manual_seed(0)
    output = kernel(*arguments[0], **arguments[1])
    worst, why = difference(task.reference(sample), output, tolerances)
    if why is not None:
        return worst, why
    if sample["changes_inputs"]:
        task.function(*after[0], **after[1])
    _, why = difference(list(after), list(arguments), tolerances if sample["changes_inputs"] else {})
    if why is not None:
        return worst, f"the inputs afterwards: {why}"
    if sample["changes_inputs"]:
        return worst, None
    kept = mapped(output, torch.clone)
    # In place: what remembers an answer by where its inputs lie would be fast, and wrong.
    moved(arguments), moved(after)
    torch.manual_seed(0)
    again = kernel(*arguments[0], **arguments[1])
    error, why = difference(precise(task, after), again, tolerances)
    worst = max(worst, error)
    if why is None:
        _, why = difference(list(after), list(arguments), {})
        why = why and f"the inputs afterwards: {why}"
    if why is not None:
        return worst, f"with other numbers: {why}"
    _, why = difference(kept, output, {})
    return worst, why and "the next call changes its output: it has to return new memory"


# --- is it faster?


def time_ms(task: Task, call: Callable[[], Any]) -> float:
    """One timing: by events on a device, by a clock on a CPU."""
    if task.device.type == "cpu":
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6
    torch.accelerator.synchronize()
    begin, end = (torch.Event(task.device, enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.accelerator.synchronize()
    return float(begin.elapsed_time(end))


def measure(task: Task, sample: dict[str, Any], kernel: Callable[..., Any]) -> dict[str, list[float]]:
    """Time both in turns: AB BA AB .."""
    shared = task.arguments(sample)
    repeats = 1

    def run(function: Callable[..., Any]) -> float:
        args, kwargs = copy.deepcopy(shared) if sample["changes_inputs"] else shared

        def call() -> None:
            for _ in range(repeats):
                function(*args, **kwargs)

        return time_ms(task, call) / repeats

    probe = min(run(task.function) for _ in range(3))
    if not sample["changes_inputs"]:
        repeats = max(1, min(MAX_REPEATS, round(SHORT_MS / max(probe, 1e-3))))
    times: dict[str, list[float]] = {"baseline_ms": [], "candidate_ms": []}
    sides = [("baseline_ms", task.function), ("candidate_ms", kernel)]
    for number in range(WARMUPS + PAIRS):
        for name, function in sides if number % 2 == 0 else sides[::-1]:
            taken = run(function)
            if number >= WARMUPS:
                times[name].append(taken)
    return times


def evaluate(folder: Path, candidate: Path) -> dict[str, Any]:
    """All stages, up to the first one that fails."""
    task = Task(folder)
    result: dict[str, Any] = {"stage": "compile", "error": None, "samples": []}
    try:
        kernel = load_candidate(candidate)
        result["stage"] = "validation"
        with torch.no_grad():
            for number, sample in enumerate(task.samples):
                error, why = check(task, sample, kernel)
                result["samples"].append({"label": sample["label"], "num_calls": sample["num_calls"]})
                result["samples"][-1] |= {"max_rel_error": error, "reason": why}
                if why is not None:
                    result["error"] = f"sample {number}: {why}"
                    return result
            result["stage"] = "benchmark"
            for number, sample in enumerate(task.samples):
                result["samples"][number] |= measure(task, sample, kernel)
    except (Exception, SystemExit) as error:
        result["error"] = f"{type(error).__name__}: {error}"[:MAX_ERROR]
    return result


def main() -> int:
    """Read the command line, evaluate, and tell."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("candidate", nargs="?", type=Path, help="the candidate's file; by default candidate.py here")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where task.json is")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--answer-fd", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer_fd is not None:
        os.set_inheritable(options.answer_fd, False)
    own = os.getpid()
    result = evaluate(options.folder, options.candidate or options.folder / "candidate.py")
    if os.getpid() != own:
        os._exit(0)  # a candidate forked, and one answer is enough
    if options.answer_fd is not None:
        os.write(options.answer_fd, json.dumps(result).encode())
        os._exit(0)  # threads that a candidate started need not be waited for
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0 if result["error"] is None else 1


def ratio_of(baseline: list[float], candidate: list[float]) -> tuple[float, float, float]:
    """The median ratio of pairs, between the ends of its 95 % interval from resampled pairs."""
    ratios = [one / other for one, other in zip(baseline, candidate, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], statistics.median(ratios), medians[-RESAMPLES // 40]


def show(result: dict[str, Any]) -> None:
    """Print a line for each sample."""
    for sample in result["samples"]:
        line = f"{sample['label']}: " + (sample["reason"] or f"right (largest error {sample['max_rel_error']:.2g})")
        if "candidate_ms" in sample:
            sides = [statistics.median(sample[name]) for name in ("baseline_ms", "candidate_ms")]
            low, typical, high = ratio_of(sample["baseline_ms"], sample["candidate_ms"])
            line += f", {sides[0]:.4g} -> {sides[1]:.4g} ms, {typical:.2f} times as fast ({low:.2f} to {high:.2f})"
        print(line)
    if result["error"] is not None:
        print(f"failed at {result['stage']}: {result['error']}")


if __name__ == "__main__":
    sys.exit(main())
