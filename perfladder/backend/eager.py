"""The module as it is, or under autocast, or in another memory format."""

from __future__ import annotations

from typing import ClassVar

from perfladder.backend.autocast import AutocastConfig, under_autocast
from perfladder.backend.base import Backend, BuildRequest, Built


class TorchEagerBackendConfig(AutocastConfig):
    """Options of the eager backend."""


class TorchEagerBackend(Backend):
    """No compiler: what the plain module does. Without options this is the baseline itself."""

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

    def compile(self, request: BuildRequest) -> Built:
        """The plain forward."""
        return Built(under_autocast(request.forward, self.config, request.graph, request.device))
