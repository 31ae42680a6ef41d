"""Kernel providers of known speed and known faults: they move a clock, which else moves by itself when it is read."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn import functional

from perfladder.kernels import KernelProvider

TICK_MS = 10.0
"""What a timing takes in which no toy has a part."""


class TickingClock:
    """Nanoseconds: a tick at each reading, and what a toy takes or saves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += round(TICK_MS * 1e6)
        return self.now_ns

    def pass_ms(self, ms: float) -> None:
        self.now_ns += round(ms * 1e6)


clock = TickingClock()
calls: Counter[str] = Counter()


class Toy(KernelProvider):
    """Right, and takes `ms` more than the function."""

    name = "toy"
    functions = ("gelu",)
    ms = 0.0

    def __call__(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            calls[self.name] += 1
            clock.pass_ms(self.ms)
        return self.result(self.original(*args, **kwargs), *args)

    def result(self, right, *args):
        return right


class Faster(Toy):
    name, ms = "toy_faster", -2.0


class FasterStill(Toy):
    name, ms = "toy_faster_still", -3.0


class Slower(Toy):
    name, ms = "toy_slower", 2.0


class Equal(Toy):
    name = "toy_equal"


class Wrong(Faster):
    name = "toy_wrong"

    def result(self, right, *args):
        return right * 1.01


class NanForOneShape(Faster):
    """NaN in calls of three columns only."""

    name = "toy_nan"

    def result(self, right, *args):
        return torch.full_like(right, float("nan")) if right.shape[-1] == 3 else right


class OtherDtype(Faster):
    name = "toy_dtype"

    def result(self, right, *args):
        return right.to(torch.float64)


class ChangesInput(Faster):
    name = "toy_changes_input"

    def result(self, right, *args):
        args[0].add_(1)
        return right


class Raises(Faster):
    name = "toy_raises"

    def result(self, right, *args):
        raise RuntimeError("misaligned address")


class NeverPrepared(Faster):
    name = "toy_unprepared"

    def prepare(self, samples):
        raise OSError("no such library")


class ForTwoColumns(FasterStill):
    name = "toy_two_columns"

    def why_not_for(self, *args, **kwargs):
        return None if args[0].shape[-1] == 2 else "it takes two columns"


class NotTraceable(Faster):
    name = "toy_not_traceable"
    is_traceable = False


class Tagged(KernelProvider):
    """Adds a number to what the function gives, so that it can be seen which one served a call."""

    name = "toy_tagged"
    functions = ("gelu", "relu", "scaled_dot_product_attention", "conv2d")

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.number = number

    def __call__(self, *args, **kwargs):
        return self.original(*args, **kwargs) + self.number


class Net(nn.Module):
    """Two forms of call of `gelu`: of two columns, and of three."""

    def forward(self, x):
        return functional.gelu(x[:, :2]).sum() + functional.gelu(x[:, :3]).sum()
