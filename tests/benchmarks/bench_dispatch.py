"""What a tuned module's call costs over the plain module's, and what each backend's own entry costs.

Goals: with the eager backend at most 5 us for one tensor, and 15 us for three tensors, a nested dict and scalars.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import perfladder as pl


class OneTensor(nn.Module):
    """Takes one tensor, and does nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ManyArguments(nn.Module):
    """Takes what a UNet takes, and does nothing."""

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added: dict[str, Any] | None = None,
        scale: float = 1.0,
        return_dict: bool = True,
        guidance: int = 1,
    ) -> torch.Tensor:
        return sample


def calls(batch: int) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The two forms of call, by name."""
    sample, timestep, states = torch.randn(batch, 4, 8, 8), torch.ones(batch), torch.randn(batch, 77, 16)
    nested = {"text_embeds": torch.randn(batch, 8), "inner": {"time_ids": torch.randn(batch, 6), "flag": True}}
    settings = {"added": nested, "scale": 0.5, "return_dict": False, "guidance": 3}
    return {
        "one tensor": (OneTensor().eval(), (sample,), {}),
        "three tensors, nested dict, scalars": (
            ManyArguments().eval(),
            (sample, timestep),
            {"encoder_hidden_states": states, **settings},
        ),
    }


def time_us(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> float:
    """Microseconds of a call, mean of `number` calls in a row."""
    start = time.perf_counter_ns()
    for _ in range(number):
        function(*args, **kwargs)
    return (time.perf_counter_ns() - start) / number / 1000


def paired(first: Callable[..., Any], second: Callable[..., Any], call: Any, rounds: int, number: int) -> list[float]:
    """Medians of both, taken in turns, and of their difference."""
    args, kwargs = call
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        sides = [first, second] if turn % 2 == 0 else [second, first]
        pair = [time_us(side, args, kwargs, number) for side in sides]
        times.append((pair[0], pair[1]) if turn % 2 == 0 else (pair[1], pair[0]))
    return [
        statistics.median(one for one, _ in times),
        statistics.median(two for _, two in times),
        statistics.median(two - one for one, two in times),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--inductor", action="store_true", help="Also Inductor's own entry, on a real linear layer.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pl.config.cache_dir = Path(folder)
        for name, (plain, args, kwargs) in calls(2).items():
            wrapper: Any = pl.Module(plain, strategy=pl.OneBackendStrategy(pl.backend.TorchEagerBackend()))
            pl.tune(wrapper, _dataset(args, kwargs), batch_sizes=[1, 2])
            assert wrapper.state == "tuned"
            before, after, cost = paired(plain, wrapper, (args, kwargs), options.rounds, options.number)
            assert not wrapper.num_unseen_calls, wrapper.num_unseen_calls
            print(f"{name}: plain {before:.2f} us, tuned (eager backend) {after:.2f} us, difference {cost:.2f} us")
        if options.inductor:
            layer = nn.Linear(8, 8).eval()
            compiled = torch.compile(layer.forward)
            x = torch.randn(2, 8)
            before, after, cost = paired(layer, compiled, ((x,), {}), options.rounds, options.number)
            print(
                f"Inductor's own entry, a linear layer: plain {before:.2f} us, compiled {after:.2f} us, {cost:.2f} us"
            )


def _dataset(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Samples from which batches of the same form are made."""

    def part(value: Any, index: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[index]
        return {name: part(inner, index) for name, inner in value.items()} if isinstance(value, dict) else value

    return [
        (tuple(part(value, index) for value in args), {name: part(value, index) for name, value in kwargs.items()})
        for index in range(2)
    ]


if __name__ == "__main__":
    main()
