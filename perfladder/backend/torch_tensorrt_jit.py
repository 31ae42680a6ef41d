"""torch.compile with Torch-TensorRT, compiled when it is first called."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from perfladder.backend.autocast import under_autocast
from perfladder.backend.base import Backend, BuildRequest, Built
from perfladder.backend.inductor_jit import compile_call, warmed_up
from perfladder.backend.torch_tensorrt_library import (
    LIBRARIES,
    TorchTensorRTConfig,
    lowers_precision,
    settings_for,
    told_settings,
    why_not_here,
)

if TYPE_CHECKING:
    import torch


class TorchTensorRTJitBackendConfig(TorchTensorRTConfig):
    """Options of torch.compile with Torch-TensorRT."""

    dynamic: bool | None = Field(default=None, description="None: dynamic if the graph has axes that vary.")
    fullgraph: bool = Field(default=False, description="Fail where the graph would break.")


class TorchTensorRTJitBackend(Backend):
    """Compiles the module's forward into TensorRT engines, and what TensorRT cannot do into calls of torch."""

    name = "torch_tensorrt_jit"
    config_class: ClassVar = TorchTensorRTJitBackendConfig
    device_types = ("cuda",)
    libraries = LIBRARIES

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers differ by design: under autocast and with lower precisions they do."""
        return lowers_precision(self.config)

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: the library is missing, does not load, or refuses this GPU."""
        return super().why_not(device) or why_not_here(device)

    def compile(self, request: BuildRequest) -> Built:
        """Compile, and run the samples, so that all engines are there before somebody waits for one.

        Raises:
            InputError: The installed version has no such setting.
        """
        importlib.import_module("torch_tensorrt")  # which makes its name known to torch.compile
        dynamo = importlib.import_module("torch_tensorrt.dynamo")
        accepted = {one.name for one in dataclasses.fields(dynamo.CompilationSettings)}
        config: TorchTensorRTJitBackendConfig = self.config
        settings = settings_for(config, request.device, accepted)
        compiled = compile_call(
            under_autocast(request.forward, config, request.graph, request.device),
            backend="torch_tensorrt",
            dynamic=config.dynamic if config.dynamic is not None else request.graph.has_dynamic_axis or None,
            fullgraph=config.fullgraph,
            options=settings,
        )
        return warmed_up(compiled, request, {"settings": told_settings(settings)})
