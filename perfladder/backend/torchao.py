"""Quantization by torchao: linear layers with smaller weights, or smaller activations too."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeGuard

from pydantic import Field

from perfladder.backend.base import Backend, BackendConfig, BuildRequest, Built
from perfladder.backend.inductor_jit import compile_call, inductor_is_missing, warmed_up
from perfladder.errors import InputError, TuningError

if TYPE_CHECKING:
    import torch
    from torch import nn

Quantization = Literal["int8wo", "int8dq", "int4wo", "fp8wo", "fp8dq", "mxfp8dq", "nvfp4dq"]


class _Scheme(NamedTuple):
    """A configuration of torchao, and what it needs.

    `capability` is the least compute capability of an NVIDIA GPU; `on_cpu` whether it runs on a CPU.
    """

    module: str
    config: str
    capability: tuple[int, int]
    on_cpu: bool
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


_SCHEMES: Final[dict[str, _Scheme]] = {
    "int8wo": _Scheme("torchao.quantization", "Int8WeightOnlyConfig", (7, 0), True),
    "int8dq": _Scheme("torchao.quantization", "Int8DynamicActivationInt8WeightConfig", (7, 5), True),
    "int4wo": _Scheme("torchao.quantization", "Int4WeightOnlyConfig", (8, 0), False, ("bfloat16",)),
    "fp8wo": _Scheme("torchao.quantization", "Float8WeightOnlyConfig", (8, 0), True),
    "fp8dq": _Scheme("torchao.quantization", "Float8DynamicActivationFloat8WeightConfig", (8, 9), False),
    "mxfp8dq": _Scheme(
        "torchao.prototype.mx_formats", "MXDynamicActivationMXWeightConfig", (10, 0), False, ("bfloat16",)
    ),
    "nvfp4dq": _Scheme(
        "torchao.prototype.mx_formats", "NVFP4DynamicActivationNVFP4WeightConfig", (10, 0), False, ("bfloat16",)
    ),
}
"""Source: torchao 0.17 and 0.18, quantization/quant_api.py and prototype/mx_formats; capabilities of its checks."""


class TorchAOBackendConfig(BackendConfig):
    """Options of quantization."""

    quantization: Quantization = Field(default="int8wo", description="wo: weights only; dq: activations too.")
    compile: bool = Field(default=True, description="Compile it, without which most schemes are slower than eager.")
    mode: Literal["default", "max-autotune-no-cudagraphs"] | None = None
    min_features: int = Field(default=0, ge=0, description="Leave linear layers with fewer inputs or outputs alone.")


class TorchAOBackend(Backend):
    """Quantizes linear layers in a copy of the module. Its numbers differ from eager's, so it needs a quality gate."""

    name = "torchao"
    config_class: ClassVar = TorchAOBackendConfig
    libraries = ("torchao",)

    @property
    def is_lossy(self) -> bool:
        """Always."""
        return True

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: torchao is not installed, or the device cannot do this scheme."""
        if reason := super().why_not(device):
            return reason
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed: pip install torchao"
        name, scheme = self.config.quantization, _SCHEMES[self.config.quantization]
        if device.type == "cpu" and not scheme.on_cpu:
            return f"{name} needs an NVIDIA GPU of compute capability {_version(scheme.capability)}"
        if device.type == "cuda":
            import torch

            found = torch.cuda.get_device_capability(device)
            if found < scheme.capability:
                return f"{name} needs compute capability {_version(scheme.capability)}; {device} has {_version(found)}"
        return inductor_is_missing(device) if self.config.compile else None

    def why_not_for(self, module: nn.Module) -> str | None:
        """It has no linear layer of a dtype that this scheme takes."""
        linear = [layer for layer in module.modules() if _is_linear(layer)]
        if not linear:
            return "the module has no linear layer"
        dtypes = {str(layer.weight.dtype).removeprefix("torch.") for layer in linear}
        accepted = _SCHEMES[self.config.quantization].dtypes
        if not dtypes & set(accepted):
            return (
                f"{self.config.quantization} takes weights of {' or '.join(accepted)}, not {', '.join(sorted(dtypes))}"
            )
        return None

    def compile(self, request: BuildRequest) -> Built:
        """Quantize a copy.

        Raises:
            TuningError: No layer was changed.
        """
        module = copy.deepcopy(request.module)
        quantize, config = self._torchao()
        before = {name: _kind_of_weight(layer) for name, layer in module.named_modules() if _is_linear(layer)}
        quantize(module, config, filter_fn=self._wants)
        layers = dict(module.named_modules())
        changed = [name for name, kind in before.items() if _kind_of_weight(layers[name]) is not kind]
        if not changed:
            raise TuningError(f"{self.config.quantization} changed none of {len(before)} linear layers")
        details = {"num_changed_layers": len(changed), "num_linear_layers": len(before)}
        forward = module.forward
        if not self.config.compile:
            return Built(forward, details, owns_weights=True)
        compiled = compile_call(forward, mode=self.config.mode, dynamic=request.graph.has_dynamic_axis or None)
        built = warmed_up(compiled, request, details)
        return Built(built.call, built.details, owns_weights=True)

    def _torchao(self) -> tuple[Callable[..., None], Any]:
        scheme = _SCHEMES[self.config.quantization]
        quantize = importlib.import_module("torchao.quantization").quantize_
        config = getattr(importlib.import_module(scheme.module), scheme.config, None)
        if config is None:
            raise InputError(f"This torchao has no {scheme.config}; {self.config.quantization} needs 0.17 or newer.")
        # The first form of some schemes is deprecated; the second one is the default of the others.
        is_first = getattr(inspect.signature(config).parameters.get("version"), "default", 2) == 1
        return quantize, config(version=2) if is_first else config()

    def _wants(self, layer: nn.Module, _path: str) -> bool:
        return _is_linear(layer) and min(layer.in_features, layer.out_features) >= self.config.min_features


def _is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    from torch import nn

    return isinstance(layer, nn.Linear)


def _kind_of_weight(layer: nn.Module) -> type:
    return type(getattr(layer.weight, "data", layer.weight))


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
