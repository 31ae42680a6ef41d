"""The module as it is, or under autocast, or in another memory format."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from perfladder.backend.autocast import AutocastConfig, under_autocast
from perfladder.backend.base import Backend, BuildRequest, Built, why_no_graphs

if TYPE_CHECKING:
    import torch


class TorchEagerBackendConfig(AutocastConfig):
    """Options of the eager backend."""

    cuda_graphs: bool = Field(default=False, description="Replay a CUDA graph from the second call of a size on.")


class TorchEagerBackend(Backend):
    """No compiler: what the plain module does, also as a CUDA graph. Without options this is the baseline itself."""

    name = "eager"
    config_class: ClassVar = TorchEagerBackendConfig
    is_isolated = False
    runs_forward = True

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers differ from eager's by design: under autocast they do."""
        return bool(self.config.autocast_enabled)

    @property
    def is_baseline(self) -> bool:
        """Whether this is what all candidates are compared with."""
        return self.config == TorchEagerBackendConfig()

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: not every one has CUDA graphs."""
        return super().why_not(device) or (why_no_graphs(device) if self.config.cuda_graphs else None)

    def compile(self, request: BuildRequest) -> Built:
        """The plain forward."""
        built = Built(under_autocast(request.forward, self.config, request.graph, request.device))
        if not self.config.cuda_graphs:
            return built
        from perfladder.backend.graphed_call import graphed

        return graphed(built, request)
