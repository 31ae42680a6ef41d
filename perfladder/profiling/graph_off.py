"""Modules once more without CUDA graphs, so that each of their kernels has a launch of its own to read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from perfladder import _torch_private

if TYPE_CHECKING:
    from perfladder.backend.graphed_call import GraphedCall


@contextmanager
def without_graphs(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module | GraphedCall]]:
    """Let compiled and tuned modules that run as CUDA graphs run the same code without them, inside the block.

    Compiled ones are compiled anew, by their own options but for the graphs, at their first call. Graphs that other
    code captures (`torch.cuda.CUDAGraph`, `make_graphed_callables`, compiled functions that are no module) stay.

    Args:
        modules: Those to look at; of a wrapper that `torch.compile` returned, the wrapper.

    Yields:
        The modules that run without graphs now, and the calls of tuned ones.
    """
    replaced: list[tuple[nn.Module, str, object]] = []
    try:
        for module in {id(module): module for module in modules}.values():
            compiled = _torch_private.find_compiled_call(module)
            options = None if compiled is None else _torch_private.inductor_options(compiled.configured)
            if compiled is None or options is None or not options.get(_torch_private.GRAPHS_OPTION):
                continue
            plain = torch.compile(
                compiled.original,
                options={**options, _torch_private.GRAPHS_OPTION: False},
                dynamic=_torch_private.compiled_dynamic(compiled.configured),
            )
            replaced.append((module, compiled.attribute, vars(module)[compiled.attribute]))
            vars(module)[compiled.attribute] = plain.forward if isinstance(plain, nn.Module) else plain
        with _tuned_without_graphs(modules) as calls:
            yield [*(module for module, _, _ in replaced), *calls]
    finally:
        for module, attribute, before in reversed(replaced):
            vars(module)[attribute] = before


@contextmanager
def _tuned_without_graphs(modules: Sequence[nn.Module]) -> Iterator[list[GraphedCall]]:
    """Let calls of tuned modules run without graphs; gives those of these modules."""
    used = sys.modules.get("perfladder.backend.graphed_call")
    if used is None:  # nothing was tuned so, and nothing is imported for it
        yield []
        return
    from perfladder.tuning.module import Module, control_of

    controls = [control_of(module) for module in modules if isinstance(module, Module)]
    forms = {id(chosen.graph) for control in controls for chosen in control.chosen}
    with used.graphs_off() as calls:
        yield [call for call in calls if id(call.form) in forms]
