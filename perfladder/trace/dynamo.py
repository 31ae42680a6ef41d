"""Spans that `torch.compile`'s runtime writes as if they were operators: looking up compiled code, entering it.

What such a span holds for itself is guards and dispatch: there is no operator to make faster. The one exception is the
call of an Inductor graph, in which, on a CPU, fused kernels hide.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from perfladder.trace.model import BoolArray, Trace

RUNTIME_NAME: Final = "TorchDynamo runtime"
"""What the self time of all these spans together is called."""
# As torch 2.11 to 2.13 write them; those of compiled autograd functions too.
_RUNTIME: Final = re.compile(
    r"TorchDynamo Cache Lookup|Torch-Compiled Region: .+|Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue"
    r"|CompiledFunction(Backward)?"
)
_GRAPH_CALL: Final = re.compile(r"## Call CompiledFxGraph (.+) ##")
_SHOWN: Final = 8


def is_runtime(name: str) -> bool:
    """Whether a span of this name is the runtime's own, so that its self time does no operator's work."""
    return name == RUNTIME_NAME or _RUNTIME.fullmatch(name) is not None


def is_graph_call(name: str) -> bool:
    """Whether a span of this name is the call of an Inductor graph."""
    return _GRAPH_CALL.fullmatch(name) is not None


def told_operator(name: str) -> str:
    """An operator in a sentence: of an Inductor graph the first letters of its key."""
    call = _GRAPH_CALL.fullmatch(name)
    return name if call is None else f"the Inductor graph {call[1][:_SHOWN]}"


def find_wrappers(trace: Trace) -> BoolArray:
    """Return which names are no operator that code calls, but what the runtime puts around those."""
    return np.array([is_runtime(name) or is_graph_call(name) for name in trace.names], bool)


def with_runtime_as_one(trace: Trace) -> Trace:
    """Return the trace with all of the runtime's spans under one name; positions and indices of names stay."""
    found = np.flatnonzero([is_runtime(name) for name in trace.names])
    if not len(found):
        return trace
    names = list(trace.names)
    names[found[0]] = RUNTIME_NAME
    one = np.arange(len(names), dtype=trace.name_id.dtype)
    one[found] = found[0]
    return replace(trace, names=tuple(names), name_id=one[trace.name_id])
