"""Names for what a compiled region launches: kernels that Inductor fused carry their operators in their names."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import torch

# Inductor's naming: backend, kind of loop (pointwise, reduction, ...), the operators, a number. On a CPU the profiler's
# name has the graph before it.
_FUSED: Final = re.compile(r"(?:graph_\d+_)?(?:triton_[a-z]+|cpp)_fused_(?P<operators>\w*?[a-z]\w*?)(?:_\d+)?")
_OPERATOR: Final = re.compile(r"(?:\w+::)(\w+)")


def region_name(module: str, kernel: str, operator: str) -> str:
    """Return the function name of a kernel that a compiled region launched.

    Args:
        module: Name of the compiled module.
        kernel: Name of the kernel.
        operator: Name of the innermost operator around it.

    Returns:
        `compiled region blocks.0: fused add, gelu`, or with the one operator of an extern kernel, or with none for what
        the region's own code does, such as checking its guards.
    """
    region = f"compiled region {module}".rstrip()
    fused = fused_operators(kernel) or fused_operators(operator)
    if fused:
        return f"{region}: fused {', '.join(fused)}"
    match = _OPERATOR.fullmatch(operator)
    return f"{region}: {match[1]}" if match else region


@lru_cache(maxsize=4096)
def fused_operators(kernel: str) -> tuple[str, ...]:
    """Return the operators that a fused kernel's name tells, e.g. `("add", "gelu")`; none if it is no such kernel."""
    match = _FUSED.fullmatch(kernel)
    return tuple(_split(match["operators"])) if match else ()


def _split(joined: str) -> list[str]:
    """Split names that are joined by underscores and hold underscores: the longest known operator comes first."""
    found = []
    while joined:
        ends = [index for index in range(1, len(joined) + 1) if index == len(joined) or joined[index] == "_"]
        known = [end for end in ends if hasattr(torch.ops.aten, joined[:end])]
        end = known[-1] if known else next(end for end in ends if joined[:end].strip("_"))
        found.append(joined[:end])
        joined = joined[end + 1 :]
    return found
