"""Other kernels for single calls, inside what another backend makes of the module."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field, JsonValue, ValidationError

from perfladder.backend.base import Backend, BackendConfig, BuildRequest, Built
from perfladder.errors import InputError, TuningError
from perfladder.files import write_atomically
from perfladder.models import Model, input_error

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfladder.functional.mode import FunctionMode
    from perfladder.kernels.base import KernelProvider
    from perfladder.kernels.plan import KernelOptimizationPlan
    from perfladder.tuning.graphs import GraphSpec

_logger = logging.getLogger("perfladder.tuning")

_PLAN: Final = "kernel_plan.json"


class NamedConfig(Model):
    """A backend or a provider by its name, with its options."""

    name: str = Field(min_length=1)
    config: dict[str, JsonValue] = {}


class KernelSelectorBackendConfig(BackendConfig):
    """Options of the choice of kernels."""

    delegate: NamedConfig = Field(default=NamedConfig(name="inductor_jit"), description="The backend around it.")
    providers: tuple[NamedConfig, ...] | None = Field(default=None, description="None: the default ones.")
    min_time_share: float = Field(default=0.01, ge=0, le=1, description="Least part of the time of a form of call.")


class KernelSelectorBackend(Backend):
    """Chooses kernels for calls inside the module, and serves them inside what a delegate makes of it.

    The plan is kept only if the delegate with it is faster than the delegate without; otherwise the delegate alone is
    what was built, and the details say why. The plan lies among the build's files, and so in saved archives.

    Args:
        config: Its options, with backends and providers by name; instead of all else.
        delegate_backend: What runs the module: one that calls its forward, as `eager` and `inductor_jit` do. None for
            `TorchInductorJitBackend()`.
        providers: What to try; None for `pl.kernels.default_providers()`.
        options: Other fields of the config, by name.

    Raises:
        InputError: An option is wrong.
    """

    name = "kernel_selector"
    config_class: ClassVar = KernelSelectorBackendConfig

    def __init__(
        self,
        config: KernelSelectorBackendConfig | None = None,
        *,
        delegate_backend: Backend | None = None,
        providers: Sequence[KernelProvider] | None = None,
        **options: Any,
    ) -> None:
        if config is not None and (delegate_backend is not None or providers is not None):
            raise InputError("KernelSelectorBackend: give a config, or a delegate and providers, not both.")
        if delegate_backend is not None:
            if not isinstance(delegate_backend, Backend):
                raise InputError(f"delegate_backend: expected a backend, not a {type(delegate_backend).__name__}.")
            options["delegate"] = _named(delegate_backend)
        if providers is not None:
            options["providers"] = tuple(_named(provider) for provider in providers)
        super().__init__(config, **options)
        self.delegate = delegate_backend if delegate_backend is not None else self._delegate_by_name()
        self.providers = list(providers) if providers is not None else self._providers_by_name()
        if self.delegate.config.memory_format is not None:
            raise InputError("delegate_backend: give memory_format to KernelSelectorBackend, not to its delegate.")

    def __repr__(self) -> str:
        changed = self.config.model_dump(exclude_defaults=True, exclude={"delegate", "providers"})
        tried = [] if self.config.providers is None else [f"providers={self.providers!r}"]
        parts = [
            f"delegate_backend={self.delegate!r}",
            *tried,
            *(f"{name}={value!r}" for name, value in changed.items()),
        ]
        return f"KernelSelectorBackend({', '.join(parts)})"

    def _delegate_by_name(self) -> Backend:
        from perfladder.backend.registry import find_backend

        kind = find_backend(self.config.delegate.name)
        return kind(_validated(kind, self.config.delegate.config, "delegate"))

    def _providers_by_name(self) -> list[KernelProvider] | None:
        if self.config.providers is None:
            return None
        from perfladder.kernels.registry import find_provider

        kinds = [(find_provider(one.name), one) for one in self.config.providers]
        return [kind(_validated(kind, one.config, "providers")) for kind, one in kinds]

    @property
    def libraries(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the delegate, and those that providers take kernels from."""
        return (*self.delegate.libraries, "flash-attn", "flash-attn-4", "sageattention", "diffusers")

    @property
    def classes(self) -> list[type]:
        """Those of the delegate and of the providers too."""
        return [type(self), *self.delegate.classes, *(type(provider) for provider in self.providers or ())]

    @property
    def is_lossy(self) -> bool:
        """Whether the delegate's numbers differ from eager's by design; a provider's never do."""
        return self.delegate.is_lossy

    @property
    def is_portable(self) -> bool:
        """A choice by speed is one for this hardware and these versions."""
        return False

    def why_not(self, device: torch.device) -> str | None:
        """Besides the delegate's reasons: it has to run the forward that it is given."""
        if not self.delegate.runs_forward:
            return f"{self.delegate.name} does not run the module's own forward, inside which calls could be swapped"
        return self.delegate.why_not(device)

    def why_not_for(self, module: nn.Module) -> str | None:
        """As the delegate says."""
        return self.delegate.why_not_for(module)

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """As the delegate says."""
        return self.delegate.why_not_for_graph(graph)

    def compile(self, request: BuildRequest) -> Built:
        """Take the plan that an earlier build left, or make one; then build the delegate with it."""
        path = request.folder / _PLAN
        if path.is_file():
            return self._built(request, self._read(path))
        plan = self._find(request)
        alone = self.delegate.build(replace(request, folder=_made(request.folder / "delegate")))
        built = self._with_plan(request, plan) if plan.swaps else alone
        if plan.swaps:
            plan = self._prove(request, plan, alone, built)
        write_atomically(path, json.dumps(plan.to_dict()))
        return _told(built if plan.swaps else alone, plan)

    def load(self, request: BuildRequest) -> Built:
        """Take the plan of the archive.

        Raises:
            TuningError: It is not there.
        """
        path = request.folder / _PLAN
        if not path.is_file():
            raise TuningError(f"{path} is missing: the build is not complete.")
        return self._built(request, self._read(path))

    def _built(self, request: BuildRequest, plan: KernelOptimizationPlan) -> Built:
        if plan.swaps:
            return _told(self._with_plan(request, plan), plan)
        return _told(self.delegate.build(replace(request, folder=_made(request.folder / "delegate"))), plan)

    def _read(self, path: Path) -> KernelOptimizationPlan:
        from perfladder.kernels.plan import KernelOptimizationPlan

        plan = KernelOptimizationPlan.from_dict(json.loads(path.read_text(encoding="utf-8")))
        return plan.loaded_with([type(provider) for provider in self.providers or ()])

    def _find(self, request: BuildRequest) -> KernelOptimizationPlan:
        import torch

        from perfladder.kernels.optimizer import KernelOptimizer
        from perfladder.kernels.runtime import under_mode
        from perfladder.tuning.samples import copy_arguments

        optimizer = KernelOptimizer(self.providers, min_time_share=self.config.min_time_share)
        calls = [sample.fresh() for sample in request.samples]

        def sampled(mode: FunctionMode) -> None:
            for args, kwargs in request.calls():
                under_mode(request.forward, mode)(*args, **kwargs)

        def plain(*args: Any, **kwargs: Any) -> Any:
            fresh_args, fresh_kwargs = copy_arguments(args, kwargs)
            return request.forward(*fresh_args, **fresh_kwargs)

        settings = optimizer.settings(request.device, needs_trace=self.delegate.compiles)
        with torch.no_grad():
            return optimizer.find(sampled, plain, calls, settings)

    def _with_plan(self, request: BuildRequest, plan: KernelOptimizationPlan) -> Built:
        inside = replace(
            request, forward=plan.around(request.forward), folder=_made(request.folder / "delegate_with_plan")
        )
        return self.delegate.build(inside)

    def _prove(
        self, request: BuildRequest, plan: KernelOptimizationPlan, alone: Built, built: Built
    ) -> KernelOptimizationPlan:
        from perfladder.kernels.optimizer import KernelOptimizer
        from perfladder.kernels.whole import prove

        settings = KernelOptimizer(()).settings(request.device)
        calls = [sample.fresh() for sample in request.samples]
        return prove(plan, alone.call, built.call, calls, settings, request.module)


def _named(one: Backend | KernelProvider) -> NamedConfig:
    return NamedConfig(name=one.name, config=one.config.model_dump(mode="json"))


def _validated(kind: Any, config: dict[str, JsonValue], field: str) -> Any:
    try:
        return kind.config_class.model_validate(config)
    except ValidationError as error:
        raise input_error(error, kind.config_class, field) from None


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _told(built: Built, plan: KernelOptimizationPlan) -> Built:
    swaps: list[JsonValue] = [f"{swap.function}: {swap.provider}" for swap in plan.swaps]
    facts: dict[str, JsonValue] = {"num_swaps": len(swaps), "swaps": swaps, "plan_reason": plan.reason}
    if plan.whole is not None:
        facts["plan_speedup"] = plan.whole.comparison.speedup
    _logger.info("kernel plan: %s", plan.describe())
    return replace(built, details={**built.details, **facts})
