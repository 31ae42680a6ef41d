"""Schedulers of diffusion pipelines whose steps wait for the device only to learn which step it is.

Such a scheduler keeps its timesteps on the device, and pipelines hand each of them to its `step`. One that looks it up
in a table of the host's, or compares it, waits for all work before it. Here `step` gets the same number from a copy on
the host, which is made beside that work while the timesteps are set.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Final, cast

import torch

from perfladder._torch_private import change_count
from perfladder.backend.cuda_lane import is_recorded, on_device
from perfladder.errors import InputError
from perfladder.object_parts import attribute_at, named_values

_KEY: Final = "_perfladder_timesteps"


class HostTimesteps:
    """Lets a scheduler's `step` take its timestep from the host; the object stays, and copies of it are plain ones.

    Args:
        scheduler: An object with `timesteps`, `set_timesteps` and `step(model_output, timestep, ...)`, as those of
            diffusers are.

    Attributes:
        scheduler: The same.
        num_served: Calls of `step` that got their timestep from the host.

    Raises:
        InputError: It is no such object, or its class cannot be derived from.
    """

    def __init__(self, scheduler: Any) -> None:
        if not is_scheduler(scheduler):
            raise InputError(
                f"scheduler: a {type(scheduler).__name__} has not all of {', '.join(_NAMES)}, which a scheduler has."
            )
        if has_host_timesteps(scheduler):
            vars(scheduler)[_KEY].deactivate()
        self.scheduler = scheduler
        self.num_served = 0
        self._plain = type(scheduler)
        try:
            self._kind = _derived(self._plain)
            self._source: torch.Tensor | None = None
            self._copy: torch.Tensor | None = None
            self._copied: torch.Event | None = None
            self._version: int | None = None
            self.activate()
        except TypeError as error:
            raise InputError(f"scheduler: {self._plain.__name__} cannot be derived from: {error}.") from error

    def activate(self) -> None:
        """From now on; timesteps that are set already stay as they are."""
        self.scheduler.__class__ = self._kind
        vars(self.scheduler)[_KEY] = self

    def deactivate(self) -> None:
        """Make it the plain object again, unless another one has taken this one's place."""
        if vars(self.scheduler).get(_KEY) is self:
            del vars(self.scheduler)[_KEY]
        if type(self.scheduler) is self._kind:
            self.scheduler.__class__ = self._plain

    def note(self) -> None:
        """Begin to copy timesteps that were just set; nothing waits for it."""
        timesteps = self.scheduler.timesteps
        self._source = self._copied = None
        if not waits_for_device(timesteps) or is_recorded(timesteps.device):
            return
        with on_device(timesteps.device), torch.inference_mode(False), torch.no_grad():
            there = torch.empty_like(timesteps, device="cpu", pin_memory=timesteps.device.type == "cuda")
            self._copy = there.copy_(timesteps, non_blocking=True)
            self._copied = torch.Event(timesteps.device)
            self._copied.record()  # on the stream of the current device, whichever it was made for
        self._source, self._version = timesteps, change_count(timesteps)

    def on_host(self, timestep: Any) -> Any:
        """The same number on the host, if it is one of the timesteps that were set; else what was given."""
        source, there = self._source, self._copy
        if source is None or there is None or not isinstance(timestep, torch.Tensor) or timestep.dim():
            return timestep
        offset = timestep.storage_offset() - source.storage_offset()
        step = source.stride(0) or 1
        is_one = (
            timestep.dtype == source.dtype
            and timestep.device == source.device
            and timestep.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            and offset % step == 0
            and 0 <= offset // step < len(there)
            and change_count(source) == self._version
        )
        if not is_one:
            return timestep
        if self._copied is not None:
            if is_recorded(source.device):
                return timestep
            self._copied.synchronize()
            self._copied = None
        self.num_served += 1
        return there[offset // step]


_NAMES: Final = ("timesteps", "set_timesteps", "step")


def waits_for_device(timesteps: Any) -> bool:
    """Whether to learn the value of one of them a host has to wait for a device."""
    return isinstance(timesteps, torch.Tensor) and timesteps.dim() == 1 and timesteps.device.type not in ("cpu", "meta")


def is_scheduler(value: Any) -> bool:
    """Whether an object has what a scheduler of diffusers has."""
    if isinstance(value, (type, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return "timesteps" in vars(value) and all(callable(getattr(type(value), name, None)) for name in _NAMES[1:])


def has_host_timesteps(scheduler: Any) -> bool:
    """Whether it takes its timesteps from the host."""
    return isinstance(vars(scheduler).get(_KEY), HostTimesteps)


def find_schedulers(obj: Any) -> dict[str, Any]:
    """Schedulers by the path at which each is found first."""
    found: dict[int, tuple[str, Any]] = {}
    for path, value in named_values(obj):
        if is_scheduler(value):
            found.setdefault(id(value), (path, value))
    return dict(found.values())


def host_timesteps_in(obj: Any) -> dict[str, HostTimesteps]:
    """Those that take their timesteps from the host, by path."""
    found = {path: scheduler for path, scheduler in find_schedulers(obj).items() if has_host_timesteps(scheduler)}
    return {path: vars(scheduler)[_KEY] for path, scheduler in found.items()}


def scheduler_at(obj: Any, path: str, *, field_name: str) -> Any:
    """The scheduler at a path.

    Raises:
        InputError: There is none.
    """
    found = attribute_at(obj, path, field_name=field_name)
    if not is_scheduler(found):
        raise InputError(f"{field_name}: {path!r} is a {type(found).__name__}, no scheduler.")
    return found


def _derived(kind: Any) -> type:
    """A class of the same name whose objects ask for their timesteps."""

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.set_timesteps(self, *args, **kwargs)
        host = vars(self).get(_KEY)
        if host is not None:
            host.note()
        return result

    @functools.wraps(kind.step)
    def step(self: Any, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        host = vars(self).get(_KEY)
        if host is not None and args:
            args = (host.on_host(args[0]), *args[1:])
        elif host is not None and "timestep" in kwargs:
            kwargs = {**kwargs, "timestep": host.on_host(kwargs["timestep"])}
        return kind.step(self, model_output, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        plain = kind.__new__(kind)
        vars(plain).update({name: value for name, value in vars(self).items() if name != _KEY})
        return copy.copy, (plain,)

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "set_timesteps": set_timesteps,
        "step": step,
        "__reduce_ex__": reduce,
    }
    return cast("type", type(kind)(kind.__name__, (kind,), names))
