"""torch.compile with Inductor, compiled when it is first called."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from perfladder._torch_private import GRAPHS_OPTION, compile_counters, has_cpp_compiler
from perfladder.backend.autocast import AutocastConfig, under_autocast
from perfladder.backend.base import Backend, BuildRequest, Built, why_no_graphs
from perfladder.errors import TuningError

if TYPE_CHECKING:
    import torch


class TorchInductorJitBackendConfig(AutocastConfig):
    """Options of torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    dynamic: bool | None = Field(default=None, description="None: dynamic if the graph has axes that vary.")
    fullgraph: bool = Field(default=False, description="Fail where the graph would break.")
    cuda_graphs: bool = Field(
        default=False, description="Replay a CUDA graph of the whole call from the second call of a size on."
    )
    options: dict[str, JsonValue] | None = Field(default=None, description="Of Inductor; not together with a mode.")

    @model_validator(mode="after")
    def _check_options(self) -> TorchInductorJitBackendConfig:
        if self.mode is not None and self.options is not None:
            raise ValueError("mode excludes options, since a mode is a set of options")
        if self.cuda_graphs and self.has_own_graphs:
            raise ValueError("cuda_graphs is given, but Inductor makes CUDA graphs of its own with this mode or option")
        return self

    @property
    def has_own_graphs(self) -> bool:
        """Whether Inductor makes CUDA graphs, of the parts of a call and for the thread that compiled only."""
        return self.mode in ("reduce-overhead", "max-autotune") or bool((self.options or {}).get(GRAPHS_OPTION))


class TorchInductorJitBackend(Backend):
    """Compiles the module's forward; child modules keep their hooks, as part of what is compiled."""

    name = "inductor_jit"
    config_class: ClassVar = TorchInductorJitBackendConfig
    runs_forward = True
    compiles = True

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers differ from eager's by design: under autocast they do."""
        return bool(self.config.autocast_enabled)

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: Inductor needs a C++ compiler on a CPU, and Triton on a GPU."""
        no_graphs = why_no_graphs(device) if self.config.cuda_graphs else None
        return super().why_not(device) or no_graphs or inductor_is_missing(device)

    def compile(self, request: BuildRequest) -> Built:
        """Compile, and run the samples, so that all graphs are there before somebody waits for one."""
        config: TorchInductorJitBackendConfig = self.config
        call = under_autocast(request.forward, config, request.graph, request.device)
        compiled = compile_call(
            call,
            mode=config.mode,
            dynamic=config.dynamic if config.dynamic is not None else request.graph.has_dynamic_axis or None,
            fullgraph=config.fullgraph,
            options=dict(config.options) if config.options else None,
        )
        keeps_outputs = config.has_own_graphs and request.device.type == "cuda"
        built = warmed_up(_with_own_outputs(compiled) if keeps_outputs else compiled, request)
        if not config.cuda_graphs:
            return built
        from perfladder.backend.graphed_call import graphed

        return graphed(built, request)


def inductor_is_missing(device: torch.device) -> str | None:
    """What Inductor needs on this kind of device and does not find; None if all is there."""
    if device.type == "cpu":
        if not has_cpp_compiler():
            return "Inductor needs a C++ compiler: install g++, or set CXX"
    elif importlib.util.find_spec("triton") is None:
        return "Inductor needs Triton on a GPU: pip install triton"
    return None


def compile_call(call: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile` of a function, with a count of recompilations of its own.

    Dynamo counts them by code object, so that modules of one class would use up one another's limit (8).
    """
    import torch

    def entry(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = entry.__code__.replace(co_name=f"tuned_{id(entry):x}")
    own = types.FunctionType(code, entry.__globals__, "tuned", None, entry.__closure__)
    own.__kwdefaults__ = entry.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(own, **settings)
    return compiled


def warmed_up(call: Callable[..., Any], request: BuildRequest, details: Mapping[str, JsonValue] | None = None) -> Built:
    """Run the samples and the shapes at the ends of the graph's ranges, and tell what was compiled for them.

    They run without gradients, and in inference mode too, which is another compilation to torch: the caller may be in
    either. What is told is of the first of both, which the second one repeats.

    Raises:
        TuningError: The compiler gave up because it had compiled too often, so that the rest would run eager.
    """
    import torch

    before = compile_counters()
    with torch.no_grad():
        for args, kwargs in request.calls():
            call(*args, **kwargs)
    made = compile_counters().since(before)
    with torch.inference_mode():
        for args, kwargs in request.calls():
            call(*args, **kwargs)
    if compile_counters().since(before).limit_hits:
        raise TuningError(f"it was recompiled up to torch's limit ({made.recompiles} times); the rest would run eager")
    if request.samples and not made.graphs:
        raise TuningError("nothing was compiled: the module, or all that it calls, is excluded from torch.compile")
    facts: dict[str, JsonValue] = {
        "num_compiled_graphs": made.graphs,
        "num_graph_breaks": made.graph_breaks,
        "num_recompiles": made.recompiles,
        "compile_s": round(made.seconds, 3),
    }
    return Built(call, {**(details or {}), **facts})


def _with_own_outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Copy outputs out of the memory of a CUDA graph, which its next run writes over."""
    import torch

    from perfladder.tuning.tree import map_tensors

    def copied(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tensors(call(*args, **kwargs), torch.clone)

    return copied
