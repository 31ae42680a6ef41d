"""How much work each operator call does: arithmetic by torch's formulas, bytes by the shapes of what goes in and out.

Counted in a pass of its own, never in one that is timed or profiled: a dispatch mode slows every operator down.
Compiled code runs eagerly in that pass, so that its operators are seen too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from perfladder import _torch_private
from perfladder.instrument import Observer, Site, instrument
from perfladder.profiling.discover import UNTUNED
from perfladder.trace.labels import Label
from perfladder.trace.work import OperatorCall

# They write what their first argument points to without reading it.
_OVERWRITES: Final = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "aten::set_", "aten::resize_"})
# Of their first argument they read no more than they return.
_GATHERS: Final = frozenset(
    {"aten::embedding", "aten::index_select", "aten::index", "aten::gather", "aten::take", "aten::slice_copy"}
)
# They allocate, or look at memory in another shape although their schema does not say so.
_TOUCHES_NOTHING: Final = (
    *("aten::empty", "aten::new_empty", "aten::resize_", "aten::lift_fresh", "aten::_unsafe_view"),
    *("aten::_reshape_alias", "prim::"),
)


class _Regions(Observer):
    """Keeps the id of the innermost module or method that is running."""

    def __init__(self) -> None:
        self._open: list[str] = []

    @property
    def current(self) -> str | None:
        return self._open[-1] if self._open else None

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(Label(UNTUNED, site.path).region_id)

    def leave(self, site: Site, token: Any, result: Any) -> None:
        self._open.pop()


def record_work(run: Callable[[], object], sites: Iterable[Site]) -> list[OperatorCall]:
    """Run once and return each operator call of this thread that touches memory, in order, with its region and work.

    Args:
        run: The work.
        sites: The modules and methods that are the regions, labelled as untuned modules.
    """
    formulas, regions = _formulas(), _Regions()
    calls: list[OperatorCall] = []

    def see(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call = _count(func, args, kwargs, result, formulas, regions.current)
        if call is not None:
            calls.append(call)

    with _eagerly(), instrument(sites, regions), _torch_private.watch_dispatch(see, frozenset(formulas)):
        run()
    return calls


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Run compiled functions uncompiled, where something is compiled at all: asking otherwise imports the compiler."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _formulas() -> dict[Any, Callable[..., int]]:
    """torch's own formulas by operator packet, and that of attention for the CPU's operator, which it has none for."""
    from torch.utils.flop_counter import flop_registry

    formulas = dict(flop_registry)
    aten = torch.ops.aten
    flash = formulas.get(aten._scaled_dot_product_flash_attention)
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"):
        if flash is not None and hasattr(aten, name):
            formulas.setdefault(getattr(aten, name), flash)
    return formulas


def _count(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    formulas: dict[Any, Callable[..., int]],
    region: str | None,
) -> OperatorCall | None:
    facts = _torch_private.operator_facts(func)
    if facts.is_view or facts.name.startswith(_TOUCHES_NOTHING):
        return None
    inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(result))
    num_bytes = _bytes_read(facts, args, kwargs, inputs, outputs) + sum(map(_num_bytes, _distinct(outputs)))
    formula = formulas.get(getattr(func, "overloadpacket", func))
    flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    if not num_bytes and not flops:
        return None
    first = next((t for t in (*inputs, *outputs) if t.is_floating_point()), None)
    dtype = str(first.dtype).removeprefix("torch.") if first is not None else None
    return OperatorCall(region=region, operator=facts.name, flops=flops, num_bytes=num_bytes, dtype=dtype)


def _bytes_read(
    facts: _torch_private.OperatorFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> int:
    """Bytes of the inputs, each once; without what is only written to: an `out` argument, the target of a copy."""
    overwritten = {id(kwargs["out"])} if isinstance(kwargs.get("out"), torch.Tensor) else set()
    if facts.name in _OVERWRITES and args:
        overwritten.add(id(args[0]))
    sizes = {id(tensor): _num_bytes(tensor) for tensor in inputs if id(tensor) not in overwritten}
    if facts.name in _GATHERS and args and id(args[0]) in sizes:
        sizes[id(args[0])] = min(sizes[id(args[0])], sum(map(_num_bytes, outputs)))
    return sum(sizes.values())


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements in memory: an expanded axis has only one. Sparse tensors are not counted."""
    if tensor.layout != torch.strided:
        return 0
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
