"""Compiled modules once more without CUDA graphs, so that each of their kernels has a launch of its own to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from perfladder import _torch_private


@contextmanager
def without_graphs(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Let compiled modules that run as CUDA graphs run the same code without them, inside the block.

    They are compiled anew, by their own options but for the graphs, at their first call. Graphs that other code
    captures (`torch.cuda.CUDAGraph`, `make_graphed_callables`, compiled functions that are no module) stay.

    Args:
        modules: Those to look at; of a wrapper that `torch.compile` returned, the wrapper.

    Yields:
        The modules that run without graphs now.
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
        yield [module for module, _, _ in replaced]
    finally:
        for module, attribute, before in reversed(replaced):
            vars(module)[attribute] = before
