"""Torch-TensorRT as far as both of its backends need it: is it usable here, and which settings does it take?"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, JsonValue

from perfladder.backend.autocast import AutocastConfig
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.text import near_names

if TYPE_CHECKING:
    import torch

LIBRARIES: Final = ("torch-tensorrt", "torch-tensorrt-rtx", "tensorrt", "tensorrt-rtx-cu13-libs")

_DTYPES: Final = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
_DTYPE_SETS: Final = frozenset({"enabled_precisions"})
_DTYPE_SETTINGS: Final = frozenset({"autocast_low_precision_type"})
_SETS: Final = frozenset({"torch_executed_ops", "autocast_excluded_nodes", "autocast_excluded_ops"})
_OWN: Final = frozenset({"device", "inputs", "arg_inputs", "kwarg_inputs", "exported_program", "dryrun"})
"""What a build says itself, or what would leave nothing built."""


class TorchTensorRTConfig(AutocastConfig):
    """Options of both backends."""

    compile_config: dict[str, JsonValue] = Field(
        default={},
        description="Settings of torch_tensorrt.dynamo.compile by name; dtypes by theirs, such as 'float16'.",
    )


def why_not_here(device: torch.device) -> str | None:
    """Why Torch-TensorRT cannot be used on an NVIDIA GPU here; None if it can."""
    if importlib.util.find_spec("torch_tensorrt") is None:
        return "torch-tensorrt is not installed: pip install torch-tensorrt"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here"
    if reason := _why_not_loaded():
        return reason
    from perfladder.backend.trt_library import find_library, why_gpu_refused

    try:
        # The same library as torch_tensorrt's, which has loaded it by now.
        return why_gpu_refused(find_library(None), device)
    except NotPossibleHereError as error:
        return str(error)


@lru_cache(maxsize=1)
def _why_not_loaded() -> str | None:
    try:
        importlib.import_module("torch_tensorrt")
    except Exception as error:  # an import of it asks drivers and loads libraries, which fail in any way
        told = next(iter(str(error).splitlines()), "") or "no message"
        return (
            f"torch_tensorrt is installed, but does not load ({type(error).__name__}: {told}). It is made for one "
            "version of torch, and needs TensorRT: pip install torch-tensorrt"
        )
    return None


def settings_for(config: TorchTensorRTConfig, device: torch.device, accepted: Collection[str]) -> dict[str, Any]:
    """Settings as the library takes them.

    Without a word on them, float32 is computed as torch does (TensorRT would use TF32), and an engine that cannot be
    built is an error (it would run in torch, and be timed as if it were one).

    Args:
        config: With settings as a file holds them.
        device: Where engines are to run.
        accepted: Names of the settings that the installed version takes.

    Raises:
        InputError: A setting is unknown to this version, or a dtype to us.
    """
    import torch

    is_exact = torch.get_float32_matmul_precision() == "highest"
    found: dict[str, Any] = {"device": device, "disable_tf32": is_exact, "pass_through_build_failures": True}
    for name, value in config.compile_config.items():
        if name in _OWN or name not in accepted:
            raise InputError(_unknown(name, accepted))
        found[name] = _as_taken(name, value)
    return found


def taken_by_compile(library: Any) -> set[str]:
    """Settings that `torch_tensorrt.dynamo.compile` has; it ignores others without a word."""
    parameters = inspect.signature(library.dynamo.compile).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY} - _OWN


def lowers_precision(config: TorchTensorRTConfig) -> bool:
    """Whether outputs differ from the module's by design."""
    asked = config.compile_config.get("enabled_precisions", [])
    lower = isinstance(asked, list) and any(_plain(name) != "float32" for name in asked)
    return config.autocast_enabled or lower or bool(config.compile_config.get("enable_autocast"))


def _unknown(name: str, accepted: Collection[str]) -> str:
    if name == "enabled_precisions":
        return (
            "compile_config: this torch_tensorrt has no enabled_precisions: engines have the dtypes of the module. "
            "Use autocast_enabled=True, or a module in float16."
        )
    if name in _OWN:
        return f"compile_config: {name} is what the build gives itself; leave it out."
    return f"compile_config: this torch_tensorrt has no {name!r}. {near_names(name, sorted(accepted), 'settings')}"


def _as_taken(name: str, value: JsonValue) -> Any:
    if name in _DTYPE_SETS:
        return {_dtype(name, one) for one in (value if isinstance(value, list) else [value])}
    if name in _DTYPE_SETTINGS:
        return None if value is None else _dtype(name, value)
    return set(map(str, value)) if name in _SETS and isinstance(value, list) else value


def _dtype(name: str, value: JsonValue) -> torch.dtype:
    import torch

    if _plain(value) not in _DTYPES:
        raise InputError(f"compile_config: {name} has {value!r}; expected a dtype such as {', '.join(_DTYPES[:3])}.")
    found: torch.dtype = getattr(torch, _plain(value))
    return found


def _plain(value: JsonValue) -> str:
    return str(value).removeprefix("torch.")


def told_settings(settings: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Settings as a record holds them."""
    return {name: ", ".join(sorted(map(str, v))) if isinstance(v, set) else str(v) for name, v in settings.items()}
