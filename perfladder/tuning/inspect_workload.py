"""`perfladder inspect`: the modules of a workload's target, in a process of its own."""

from __future__ import annotations

from pydantic import Field

from perfladder.models import SCHEMA_VERSION, Model
from perfladder.target import LoadedTarget


class InspectRequest(Model):
    """How often to run, and how deep to look."""

    number_of_iterations: int = Field(default=10, gt=0)
    warmup_iterations: int = Field(default=5, ge=0)
    min_depth: int = Field(default=0, ge=0)
    max_depth: int = Field(default=5, ge=0)


class InspectedModule(Model):
    """One topmost module that ran."""

    name: str
    module_type: str
    depth: int
    execution_count: int
    total_execution_ms: float
    average_execution_ms: float
    execution_ratio: float = Field(description="Of the whole time of all iterations.")
    num_parameters: int
    num_layers: int
    precisions: list[str]
    input_types: dict[str, str]
    output_types: list[str]


class InspectResult(Model):
    """The topmost modules that ran, those that took most time first."""

    schema_version: int = SCHEMA_VERSION
    device: str
    num_iterations: int
    total_execution_ms: float
    modules: list[InspectedModule]


def measure(loaded: LoadedTarget, request: InspectRequest) -> InspectResult:
    """Inspect the workload's target while the workload's own call is made.

    Raises:
        InputError: No module of the target ran.
        WorkloadError: The workload raised.
    """
    # This brings torch, which the command line does without.
    from perfladder.tuning.inspect import Runner, inspect_runs

    runner = Runner(loaded.device, lambda: loaded.run().value, prepare=loaded.prepare_run)
    info = inspect_runs(
        loaded.obj,
        runner,
        [((), {})],
        range(request.min_depth, request.max_depth + 1),
        measured=request.number_of_iterations,
        warmup=request.warmup_iterations,
    )
    return InspectResult(
        device=str(loaded.device),
        num_iterations=info.number_of_batches,
        total_execution_ms=info.total_execution_time,
        modules=[
            InspectedModule(
                name=module.name,
                module_type=module.module_type,
                depth=module.depth,
                execution_count=module.execution_count,
                total_execution_ms=module.total_execution_time,
                average_execution_ms=module.average_execution_time,
                execution_ratio=info.ratio(module),
                num_parameters=module.num_parameters,
                num_layers=module.num_layers,
                precisions=module.precisions,
                input_types=module.input_types,
                output_types=module.output_types,
            )
            for module in info.get_modules()
        ],
    )
