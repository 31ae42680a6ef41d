"""Swap single calls while one module runs: on the thread that calls it, and nowhere else.

A `TorchFunctionMode` is of one thread. It is entered when the module's forward begins and left when it ends, so that
nothing outside that call is touched, and no function of torch is patched. `torch.compile` traces the mode together with
what it does, without a break in the graph: the lookup of a provider is decided while it traces, by comparisons that
become guards.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from perfladder._torch_private import is_any_autocast_enabled, is_compiled_in_place
from perfladder.errors import InputError
from perfladder.functional.names import composites_of
from perfladder.functional.sites import same_path_as_without_mode
from perfladder.kernels.base import KernelProvider
from perfladder.kernels.functions import function_named
from perfladder.kernels.signatures import CallSignature, key_of


class _Thread(threading.local):
    """Whether this thread is inside a provider: what that calls is not swapped again, by no plan."""

    is_inside = False


_thread: Final = _Thread()


@dataclass(frozen=True, eq=False)
class LiveSwap:
    """A prepared provider, and the calls that it serves."""

    function: str
    signature: CallSignature
    provider: KernelProvider


class _Table:
    """The swaps of one function."""

    def __init__(self, function: Callable[..., Any], swaps: Sequence[LiveSwap]) -> None:
        self._function = function
        self._device_type = swaps[0].signature.device_type
        self.by_key = {swap.signature.key: swap.provider for swap in swaps}
        self._tests = [(swap.signature.test, swap.provider) for swap in swaps if swap.provider.is_traceable]

    def traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that Dynamo traces: comparisons become guards of the graph."""
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(self._device_type)):
            for test, provider in self._tests:
                if test(args, kwargs):
                    return provider(*args, **kwargs)
        return self._function(*args, **kwargs)


class KernelMode(TorchFunctionMode):
    """Swaps calls while it is active; one serves any number of threads at once, and may be entered again inside itself.

    Args:
        swaps: Of any functions.
    """

    def __init__(self, swaps: Sequence[LiveSwap]) -> None:
        super().__init__()
        names = list(dict.fromkeys(swap.function for swap in swaps))
        self._tables: dict[Any, _Table] = {}
        for name in names:
            function = function_named(name)
            self._tables[function] = _Table(function, [swap for swap in swaps if swap.function == name])
        self._by_key = {function: table.by_key for function, table in self._tables.items()}
        self._composites = composites_of(names)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, or let another kernel do so."""
        if kwargs is None:
            kwargs = {}
        if is_dynamo_compiling():
            return self._traced(func, args, kwargs)
        # Written out here, since each call of a function costs a swap its part of a microsecond.
        by_key = self._by_key.get(func)
        if by_key is None:
            composite = self._composites.get(func)
            if composite is None:
                return func(*args, **kwargs)
            # The mode is off in here, and on again for what is called inside the function.
            with self:
                return composite(*args, **kwargs)
        # Providers are checked without gradients and autocast, and not made for calls of one another.
        if is_grad_enabled() or is_any_autocast_enabled() or _thread.is_inside:
            return func(*args, **kwargs)
        try:
            provider = by_key.get(key_of(args, kwargs))
        except TypeError:  # an argument that has no hash
            provider = None
        if provider is None:
            return func(*args, **kwargs)
        _thread.is_inside = True
        try:
            return provider(*args, **kwargs)
        finally:
            _thread.is_inside = False

    def _traced(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same for Dynamo, to which a method of a computed tensor is no key of a dict."""
        for function, table in self._tables.items():
            if func is function:
                return table.traced(args, kwargs)
        for function, composite in self._composites.items():
            if func is function:
                with self:
                    return composite(*args, **kwargs)
        if func is torch.Tensor.unflatten:  # Python code that calls super(), which Dynamo traces as a method only
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)


def under_mode(forward: Callable[..., Any], mode: TorchFunctionMode) -> Callable[..., Any]:
    """A forward inside which a mode is active; not one that streams, since the mode ends when it returns."""

    def swapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return swapped


class Activation:
    """A mode that is active during calls of one module, until `remove`; also a context manager.

    Args:
        module: Whose calls.
        mode: What is active meanwhile, on the thread that makes the call.

    Attributes:
        is_paused: The module runs as before, until this is False again.

    Raises:
        InputError: The module's calls do not run its forward.
    """

    def __init__(self, module: nn.Module, mode: TorchFunctionMode) -> None:
        self._module = _checked(module)
        self.is_paused = False
        self._is_active = True
        self._stack = ExitStack()
        # Modules that look for modes would compute something else.
        self._stack.enter_context(same_path_as_without_mode(list(module.modules())))
        self._before = vars(module).get("forward")
        self._forward = types.MethodType(self._made(mode), module)
        vars(module)["forward"] = self._forward

    def _made(self, mode: TorchFunctionMode) -> Callable[..., Any]:
        before = self._before
        plain = type(self._module).forward

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # Not active, and still called: somebody put a forward of their own around it.
            if self.is_paused or not self._is_active:
                return before(*args, **kwargs) if before is not None else plain(module, *args, **kwargs)
            with mode:
                return before(*args, **kwargs) if before is not None else plain(module, *args, **kwargs)

        functools.update_wrapper(forward, plain)
        forward.activation = self  # type: ignore[attr-defined]
        return forward

    def resumed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function during whose calls a paused activation is not."""

        def resumed(*args: Any, **kwargs: Any) -> Any:
            self.is_paused = False
            try:
                return function(*args, **kwargs)
            finally:
                self.is_paused = True

        return resumed

    def remove(self) -> None:
        """Let the module run as before; once is enough, and again does nothing."""
        if not self._is_active:
            return
        self._is_active = False
        if vars(self._module).get("forward") is self._forward:
            before = self._before
            while (other := getattr(before, "activation", None)) is not None and not other._is_active:
                before = other._before  # removed while this one was on top of it
            if before is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = before
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _checked(module: Any) -> nn.Module:
    from perfladder.tuning.module import Module

    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected a torch.nn.Module, not a {type(module).__name__}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError("module: calls inside a TorchScript module cannot be swapped; take the module it was made of.")
    if isinstance(module, Module):
        raise InputError(
            "module: it is a wrapper that tuning put there; take the plain one, `module.module`, or tune with "
            "pl.backend.KernelSelectorBackend."
        )
    if is_compiled_in_place(module):
        raise InputError(
            "module: module.compile() was called, so that its calls no longer run its forward. Apply the plan to a "
            "module that is not compiled, or tune with pl.backend.KernelSelectorBackend."
        )
    return module
