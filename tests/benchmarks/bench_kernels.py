"""What a kernel plan costs at a call, and how long it takes to make one.

Goals: at most 10 us for a swapped call over the provider alone, and a plan for MiniLM and the tiny UNet in 60 s each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.kernels.runtime import Activation, KernelMode, LiveSwap
from perfladder.kernels.signatures import CallSignature

ATTENTION = "scaled_dot_product_attention"


class Same(pl.kernels.KernelProvider):
    """The function itself, so that all that is added is the swap."""

    name = "same"
    functions = ("relu", ATTENTION)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def time_us(function: Callable[[], Any], number: int) -> float:
    """Microseconds of a call, mean of `number` calls in a row."""
    start = time.perf_counter_ns()
    for _ in range(number):
        function()
    return (time.perf_counter_ns() - start) / number / 1000


def added_us(
    without: Callable[[], Any],
    added: Callable[[], Any],
    rounds: int,
    number: int,
    mode: AbstractContextManager[Any] | None = None,
) -> tuple[float, float]:
    """Medians of the first one, and of what the second one, under a mode, takes more; taken in turns."""
    pairs = []
    for turn in range(rounds):
        times = {}
        for side in ("without", "added") if turn % 2 == 0 else ("added", "without"):
            with mode if side == "added" and mode is not None else nullcontext():
                times[side] = time_us(added if side == "added" else without, number)
        pairs.append((times["without"], times["added"]))
    return statistics.median(one for one, _ in pairs), statistics.median(two - one for one, two in pairs)


def show_overhead(rounds: int, number: int) -> None:
    """Print what a mode adds to a swapped call, to another call, and to the module's call."""
    x, q = torch.randn(64), torch.randn(1, 2, 8, 16)
    named = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    cases: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "swapped call, one tensor": ("relu", (x,), {}),
        "swapped call, three tensors": (ATTENTION, (q, q, q), {}),
        "swapped call, three tensors and names": (ATTENTION, (q, q, q), named),
    }
    with torch.no_grad():
        for label, (name, args, kwargs) in cases.items():
            provider, function = Same().of(name), getattr(functional, name)
            signature = CallSignature.of((args, kwargs))
            assert signature is not None, "it is a plain call"
            mode = KernelMode([LiveSwap(name, signature, provider)])

            def plain(provider: Any = provider, args: Any = args, kwargs: Any = kwargs) -> Any:
                return provider(*args, **kwargs)

            def swapped(function: Any = function, args: Any = args, kwargs: Any = kwargs) -> Any:
                return function(*args, **kwargs)

            base, more = added_us(plain, swapped, rounds, number, mode)
            print(f"{label}: provider {base:.2f} us, the swap adds {more:.2f} us")

        base, more = added_us(lambda: torch.abs(x), lambda: torch.abs(x), rounds, number, mode)
        print(f"other call: {base:.2f} us, the mode adds {more:.2f} us")
        net, active = Nothing(), Nothing()
        with Activation(active, mode):
            base, more = added_us(lambda: net(x), lambda: active(x), rounds, number)
        print(f"call of a module: {base:.2f} us, the activation adds {more:.2f} us")


def show_plans() -> None:
    """Print how long it takes to make a plan of the built-in workloads, and what comes of it."""
    from perfladder.workloads import diffusion, embedding

    embedder = embedding.build()
    pipe: Any = diffusion.build(size="tiny")
    inputs = {"prompt": "a lighthouse at dusk", "num_inference_steps": 2, "height": 64, "width": 64}
    sentences = [f"Sentence {number} of a few about ships and the sea." for number in range(8)]
    for label, function, data, module in (
        ("MiniLM", embedder, [((sentences,), {})], embedder.model),
        ("tiny UNet", pipe, [((), inputs)], pipe.unet),
    ):
        start = time.perf_counter()
        plan = pl.kernels.KernelOptimizer().make_plan(function, data, module=module)
        print(f"make_plan of {label}: {time.perf_counter() - start:.1f} s, {len(plan.records)} trials")
        for line in plan.describe().splitlines():
            if "not applicable" not in line:
                print(f"  {line}")


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=51, help="pairs of rounds")
    parser.add_argument("--number", type=int, default=500, help="calls in a round")
    parser.add_argument("--no-plans", action="store_true", help="the cost of a call only")
    options = parser.parse_args()
    show_overhead(options.rounds, options.number)
    if not options.no_plans:
        show_plans()


if __name__ == "__main__":
    main()
