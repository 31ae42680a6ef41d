"""What surrounds a call: torch's modes and settings, and the state of every random generator."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from perfladder.capturing.nodes import Node
from perfladder.capturing.store import CallContext
from perfladder.errors import CaptureError
from perfladder.target import LoadedTarget

if TYPE_CHECKING:
    from perfladder.capturing.decode import Decoder

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _settings() -> dict[str, Setting]:
    """How to read and how to set what changes which kernels run, by torch's own name for it."""
    import torch

    cuda, cudnn, matmul = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul

    def attribute(owner: Any, name: str) -> Setting:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return {
        "cuda.flash_sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "cuda.mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "cuda.math_sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cuda.cudnn_sdp": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "cudnn.enabled": attribute(cudnn, "enabled"),
        "cudnn.benchmark": attribute(cudnn, "benchmark"),
        "cudnn.deterministic": attribute(cudnn, "deterministic"),
        "cudnn.allow_tf32": attribute(cudnn, "allow_tf32"),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": attribute(
            matmul, "allow_fp16_reduced_precision_reduction"
        ),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": attribute(
            matmul, "allow_bf16_reduced_precision_reduction"
        ),
        "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
    }


def read_context(module: Any) -> CallContext:
    """The modes and settings in force on this thread now."""
    import torch

    autocast_device = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
    return CallContext(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast_dtype=str(torch.get_autocast_dtype(autocast_device)).removeprefix("torch.")
        if autocast_device
        else None,
        training=module.training if module is not None else None,
        settings=_read_settings(_settings()),
    )


def _read_settings(table: Mapping[str, Setting]) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {}
    for name, (read, _) in table.items():
        # torch refuses to tell a setting of the old kind once one of the new kind has been made.
        with contextlib.suppress(RuntimeError):
            value = read()
            found[name] = value if isinstance(value, (bool, int, str)) else str(value)
    return found


class ProcessSettings:
    """Torch's settings and modes as they are now, on this thread and in the process."""

    def __init__(self) -> None:
        import torch

        from perfladder._torch_private import num_function_modes

        self._settings = _read_settings(_settings())
        self._default_dtype = torch.get_default_dtype()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._num_function_modes = num_function_modes()

    def put_back(self) -> list[str]:
        """Set back what is otherwise by now, and tell what that was."""
        import torch

        from perfladder._torch_private import drop_function_modes, num_function_modes

        table = _settings()
        changed = [name for name, value in _read_settings(table).items() if self._settings.get(name, value) != value]
        for name in changed:
            table[name][1](self._settings[name])
        if torch.get_default_dtype() != self._default_dtype:
            torch.set_default_dtype(self._default_dtype)
            changed.append("default_dtype")
        if torch.is_grad_enabled() != self._is_grad_enabled:
            torch.set_grad_enabled(self._is_grad_enabled)
            changed.append("grad_enabled")
        if num_function_modes() > self._num_function_modes:
            drop_function_modes(self._num_function_modes)
            changed.append("function modes")
        return changed


def settings_in_force() -> dict[str, JsonValue]:
    """Torch's settings now, by its own names for them."""
    return _read_settings(_settings())


@contextlib.contextmanager
def context_restored(
    context: CallContext,
    device_type: str,
    attention: contextlib.AbstractContextManager[None] | None = None,
) -> Iterator[None]:
    """The modes and settings of a captured call are in force inside the block, and the present ones after it.

    Args:
        context: Those of the call.
        device_type: Where autocast applies.
        attention: The backend of attention, under the call's own settings.
    """
    import torch

    with contextlib.ExitStack() as stack:
        # In this order: entering inference_mode(False) would switch gradients on.
        stack.enter_context(torch.inference_mode(context.inference_mode))
        stack.enter_context(torch.set_grad_enabled(context.grad_enabled))
        stack.enter_context(attention or contextlib.nullcontext())
        if context.autocast_dtype:
            dtype = getattr(torch, context.autocast_dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise CaptureError(f"The capture is damaged: autocast_dtype {context.autocast_dtype!r} is no dtype.")
            stack.enter_context(torch.autocast(device_type, dtype=dtype))
        table = {name: setting for name, setting in _settings().items() if name in context.settings}
        now = _read_settings(table)
        for name, value in context.settings.items():
            if name in table and name in now and now[name] != value:
                write = table[name][1]
                stack.callback(write, now[name])
                try:
                    write(value)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise CaptureError(f"The capture is damaged: {name} cannot be {value!r} ({error}).") from error
        yield


def rng_states(loaded: LoadedTarget) -> dict[str, Any]:
    """The state of every generator that a stage may draw from without being handed it."""
    import numpy as np
    import torch

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": [version, np.array(numbers, dtype=np.uint64), gauss],
        "numpy": [name, keys, int(position), int(has_gauss), float(cached)],
    }
    if loaded.device.type != "cpu":
        states["device"] = torch.get_device_module(loaded.device).get_rng_state(loaded.device)
    return states


def restore_rng(nodes: Mapping[str, Node], decoder: Decoder, loaded: LoadedTarget) -> None:
    """Put every generator where it was."""
    import numpy as np
    import torch

    states = decoder.decode(nodes)
    try:
        torch.set_rng_state(states["cpu"])
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        np.random.set_state(tuple(states["numpy"]))
        if "device" in states and loaded.device.type != "cpu":
            torch.get_device_module(loaded.device).set_rng_state(states["device"], loaded.device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(
            f"The capture is damaged: generators cannot be restored from it ({type(error).__name__}: {error})."
        ) from error
