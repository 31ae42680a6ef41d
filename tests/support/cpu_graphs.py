"""Graphs of a CPU's work: operators are noted with the memory that they use, and done again there."""

import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trt_stand_in import CpuLane


class _Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for there, tensor in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(there, torch.Tensor) and there.data_ptr() != tensor.data_ptr():
                    there.copy_(tensor)


class OperatorLane(CpuLane):
    """What is recorded are operators of torch; a value that the host asks for cannot be."""

    def record(self, work):
        assert self.is_own, "streams of callers have other work too"
        with _Noting() as noting, torch.no_grad():
            work(0)
        return types.SimpleNamespace(replay=noting.replay)
