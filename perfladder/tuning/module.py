"""A module that can be tuned, in the place of the plain one: its class is made for it, and it shares all the rest."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from perfladder._torch_private import has_compiled_forward, is_compiled_in_place
from perfladder.errors import InputError
from perfladder.tuning.dims import SemanticPath, Shape, check_dynamic_shapes

if TYPE_CHECKING:
    from perfladder.tuning.strategies import TuneStrategy

from perfladder.tuning.control import Call, ModuleControl


class Own:
    """A name that the wrapper adds; whatever the module itself has by that name goes first."""

    def __init__(self, read: Callable[[ModuleControl], Any], name: str = "") -> None:
        self._read, self._name = read, name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # Weights and submodules are looked up after the class, where this one stands in their way.
        for kind in ("_parameters", "_buffers", "_modules"):
            if self._name in vars(instance).get(kind, ()):
                return vars(instance)[kind][self._name]
        return self._read(control_of(instance))


class Module(nn.Module):
    """A module that can be tuned, in the place of the plain one.

    It is an instance of the plain module's own class and shares its weights, submodules, hooks and attributes, so that
    hooks, `state_dict`, `isinstance` and `torch.compile` around it do what they do on the plain one. What it adds are
    the names below; an attribute of that name which the module has goes first (`control_of(module)` has them always).

    A tuned call runs without gradients. A module in training mode, or called under autocast, runs as it is. One whose
    weights are moved to another device or dtype is not tuned any more; neither is one that loads a state dict, where a
    backend has its own copy of the weights. Such a copy does not see weights that are changed in place.

    Args:
        module: What to wrap.
        name: By which it is listed; by default its qualified class name.
        strategy: How its graphs are tuned; by default `FirstWinsStrategy()`.
        strategies: One for each graph instead: a list in order of the graphs, or a mapping by graph name ("0", "1").
        dynamic_shapes: For inputs whose recorded shapes do not tell enough: a full shape by parameter name or path.

    Attributes:
        name: See above.
        device: Where its weights are.
        state: One of init, passthrough, recording, tuned.
        graph_specs: The forms of call that were recorded.
        module: The plain module.
        num_unseen_calls: Calls after tuning that ran as they are, by reason.
        tune: Tunes it from the calls recorded so far: `tune(device=None, strategy=None, dry_run=False)`.

    Raises:
        InputError: It is no module, wrapped or compiled already, TorchScript, or an argument is wrong.
    """

    def __new__(  # noqa: D102 (the class tells)
        cls,
        module: nn.Module,
        name: str | None = None,
        strategy: TuneStrategy | None = None,
        strategies: Sequence[TuneStrategy] | Mapping[str, TuneStrategy] | None = None,
        dynamic_shapes: Mapping[SemanticPath, Shape] | None = None,
    ) -> Module:
        check_module(module)
        if strategy is not None and strategies is not None:
            raise InputError("strategy and strategies: give one of them.")
        _check_strategies(strategy, strategies)
        if dynamic_shapes is not None:
            check_dynamic_shapes(dynamic_shapes)
        kind = type(module)
        control = ModuleControl(
            module, name or kind.__qualname__.replace("/", "_"), strategy, strategies, dynamic_shapes
        )
        wrapper: Any = nn.Module.__new__(wrapper_class(control))
        wrapper.__dict__ = module.__dict__
        assert isinstance(wrapper, Module), "its class is made so"
        return wrapper

    name = Own(lambda control: control.name)
    device = Own(lambda control: control.device)
    state = Own(lambda control: control.state)
    graph_specs = Own(lambda control: control.graphs)
    module = Own(lambda control: control.inner)
    num_unseen_calls = Own(lambda control: dict(control.num_unseen_calls))
    enable_passthrough = Own(lambda control: control.enable_passthrough)
    enable_recording = Own(lambda control: control.enable_recording)
    activate = Own(lambda control: control.activate)
    deactivate = Own(lambda control: control.deactivate)
    tune = Own(lambda control: _tune(control))
    perfladder_managed = Own(lambda control: "aot")
    perfladder_name = Own(lambda control: control.name)
    perfladder_state = Own(lambda control: control.state)


def _tune(control: ModuleControl) -> Callable[..., Any]:
    from perfladder.tuning.tune import tune_module

    return functools.partial(tune_module, control)


def control_of(wrapper: Any) -> ModuleControl:
    """What controls a wrapper.

    Raises:
        InputError: It is none.
    """
    control = getattr(type(wrapper), "_perfladder_control", None)
    if not isinstance(control, ModuleControl):
        raise InputError(f"A {type(wrapper).__name__} is not wrapped; wrap it with pl.wrap or pl.Module first.")
    return control


def _check_strategies(strategy: Any, strategies: Any) -> None:
    from perfladder.tuning.strategies import TuneStrategy

    if strategies is not None and not isinstance(strategies, (list, tuple, Mapping)):
        raise InputError(f"strategies: expected a list or a mapping, got a {type(strategies).__name__}.")
    several = strategies.values() if isinstance(strategies, Mapping) else strategies or ()
    for name, one in (("strategy", strategy), *(("strategies", one) for one in several)):
        if one is not None and not isinstance(one, TuneStrategy):
            raise InputError(f"{name}: {one!r} is no strategy; give objects such as MaxThroughputStrategy().")


def check_module(module: Any) -> None:
    """What cannot be wrapped.

    Raises:
        InputError: It is no module, wrapped or compiled already, or TorchScript.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected a torch.nn.Module, got a {type(module).__name__}.")
    if hasattr(type(module), "_perfladder_control"):
        raise InputError(f"module: {control_of(module).name} is wrapped already.")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError("module: a TorchScript module cannot be tuned; give the module that it was made of.")
    if is_compiled_in_place(module) or has_compiled_forward(module) or hasattr(module, "_orig_mod"):
        raise InputError("module: it is compiled already; give the plain module, so that candidates compare with it.")


def wrapper_class(control: ModuleControl, base: type | None = None, **others: Any) -> type:
    """A class for one wrapper: that of the plain module, with another forward.

    Args:
        control: Of the module.
        base: What has the names that are added; by default `Module`.
        others: Attributes in the place of those that a wrapper has.
    """
    base = base or Module
    inner, kind = control.inner, type(control.inner)
    plain, plain_forward = control.plain, kind.forward
    is_replaced = "forward" in vars(inner)

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Compilers see through to the module's own code; a method that was copied with its module is of that copy.
        if torch.compiler.is_compiling() or type(self) is kind:
            if is_replaced:
                return plain(*args, **kwargs)
            return plain_forward(self, *args, **kwargs)
        return control._route(args, kwargs)

    functools.update_wrapper(forward, plain_forward)
    if is_replaced:
        forward.__signature__ = _with_self(inner.forward)  # type: ignore[attr-defined]
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__new__": lambda _cls, *args, **kwargs: kind(*args, **kwargs),
        "__init__": lambda _self, *_args, **_kwargs: None,
        "__reduce_ex__": _refuse_pickling,
        "__copy__": lambda _self: copy.copy(inner),
        "__deepcopy__": _copy_plain,
        "_perfladder_control": control,
        "forward": _ReplacedForward(inner, forward) if is_replaced else forward,
        "_apply": _applying(kind),
        "_load_from_state_dict": _loading(kind),
    }
    added = [name for name, value in vars(base).items() if isinstance(value, Own)]
    names |= {name: _of_inner(name) for name in added if hasattr(inner, name)} | others
    meta: Any = type(kind)
    made: type = meta(kind.__name__, (base,) if kind is nn.Module else (kind, base), names)
    return made


def _applying(kind: Any) -> Call:
    """What `to`, `half` and the like call, on a module and from the one that holds it."""

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        before = [(weight.device, weight.dtype) for weight in self.parameters()]
        result: nn.Module = kind._apply(self, *args, **kwargs)
        if before != [(weight.device, weight.dtype) for weight in self.parameters()]:
            control_of(self).give_up("its weights were moved to another device or dtype.", copies_only=False)
        return result

    return apply


def _loading(kind: Any) -> Call:
    """What `load_state_dict` calls for each module."""

    def load(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kind._load_from_state_dict(self, *args, **kwargs)
        control_of(self).give_up("a state dict was loaded, and a backend has a copy of the weights.", copies_only=True)

    return load


def _of_inner(name: str) -> Own:
    return Own(lambda control: getattr(control.inner, name), name)


def _with_self(forward: Call) -> inspect.Signature | None:
    """The signature of a function that takes the module first and the arguments of `forward` after it."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return None
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def drop_own_forward(control: ModuleControl) -> None:
    """Take the wrapper's forward out of the attributes that it shares with the module.

    A library that puts a hook over `wrapper.forward`, and later takes it off, leaves it there.
    """
    forward = vars(control.inner).get("forward")
    if isinstance(forward, types.MethodType) and isinstance(forward.__self__, Module):
        del vars(control.inner)["forward"]


class _ReplacedForward:
    """The wrapper's forward where the module has one of its own in its attributes, which both share.

    Such a forward goes before the class's. Here the class's goes first, until somebody sets another one. Setting the
    module's own method again, as a library does that takes its hook off, changes the module.
    """

    def __init__(self, inner: nn.Module, function: Call) -> None:
        self._inner, self._function = inner, function
        self._later: Any = None

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._function
        return self._later or self._function.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        function = getattr(value, "__func__", None)
        if function is type(self._inner).forward and value.__self__ is self._inner:
            vars(self._inner)["forward"] = value
            self._later = None
        else:
            self._later = None if function is self._function else value

    def __delete__(self, instance: Any) -> None:
        vars(self._inner).pop("forward", None)
        self._later = None


def _refuse_pickling(wrapper: Any, _protocol: Any) -> NoReturn:
    raise TypeError(f"{control_of(wrapper).name} is wrapped for tuning and cannot be pickled; use pl.save and pl.load.")


def _copy_plain(wrapper: Any, memo: dict[int, Any]) -> nn.Module:
    """A deep copy is one of the plain module: what was chosen belongs to this one's weights."""
    copied: nn.Module = copy.deepcopy(control_of(wrapper).inner, memo)
    return copied
