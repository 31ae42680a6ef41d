"""An ONNX model as a TensorRT engine in a file, with what is known of it beside it. A build for another machine needs
no GPU where the library is TensorRT-RTX.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, JsonValue, ValidationError

from perfladder.backend.onnx_export import LOG_FILE
from perfladder.backend.reasons import ParserFault, explain_export_failure, explain_parser_faults
from perfladder.backend.shared_file import SharedFile, replace_bytes
from perfladder.backend.trt_library import DESCRIPTION, Library, TensorRTLog
from perfladder.backend.trt_profiles import Profile, Sizes, check_read_back
from perfladder.errors import NotPossibleHereError, TuningError
from perfladder.files import write_atomically
from perfladder.models import Model
from perfladder.tuning.graphs import GraphSpec

PLAN_FILE: Final = "model.plan"
PROFILES_FILE: Final = "profiles.json"
LAYERS_FILE: Final = "layers.txt"

_TENSOR: Final = re.compile(r"^ Name: (\S+), IOMode: Input,.*ProfileInfo: \[(.*)\]$", re.MULTILINE)
_SHAPE: Final = re.compile(r"(Min|Opt|Max)Shape: \[([\d,]*)\]")

Found = list[dict[str, tuple[Sizes, Sizes, Sizes]]]


class EngineRecord(Model):
    """What has to be known of an engine to run it."""

    library: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    version_compatible: bool = Field(default=False, description="Newer versions may run it.")
    outputs: list[str] = Field(description="in the order of results")
    profiles: list[Profile]

    @staticmethod
    def read(folder: Path) -> EngineRecord:
        """That of a build.

        Raises:
            TuningError: It is not there, or damaged.
        """
        try:
            return EngineRecord.model_validate_json((folder / PROFILES_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise TuningError(f"{PROFILES_FILE} of the build cannot be read: {error}") from None


@dataclass(frozen=True)
class EngineOptions:
    """How to build; names and meanings are those of the backend's options."""

    workspace_size_bytes: int | None = None
    optimization_level: int | None = None
    compatibility_level: str | None = None
    version_compatible: bool = False
    compute_capabilities: tuple[str, ...] = ()
    enable_tf32: bool = True
    timing_cache: Path | None = None


def build_plan(
    library: Library,
    model: Path,
    folder: Path,
    graph: GraphSpec,
    profiles: Sequence[Profile],
    options: EngineOptions,
) -> dict[str, JsonValue]:
    """Write the engine, its profiles, its layers and what the library said into a folder.

    Returns:
        What is worth knowing of it.

    Raises:
        TuningError: The model is refused, or the engine is not what was asked for.
    """
    start = time.monotonic()
    with library.listening() as log:
        try:
            builder = _builder(library, log)
            network = _parsed(library, builder, model)
            _check_network(network, graph, profiles)
            config = _configured(library, builder, profiles, options, log)
            cache = _with_timings(library, config, options.timing_cache)
            plan = builder.build_serialized_network(network, config)
            if plan is None:
                reason = log.failure() or "the builder gives no reason"
                raise TuningError(f"{library.title}: {explain_export_failure(RuntimeError(reason))}")
            _keep_timings(library, config, options.timing_cache, cache)
        finally:
            with (folder / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(log.text())
    facts = _inspected(library, plan, folder, profiles, log)
    replace_bytes(folder / PLAN_FILE, plan)
    record = EngineRecord(
        library=library.name,
        version=library.version,
        version_compatible=options.version_compatible,
        outputs=[network.get_output(number).name for number in range(network.num_outputs)],
        profiles=list(profiles),
    )
    write_atomically(folder / PROFILES_FILE, record.model_dump_json())
    return {
        "library": library.title,
        "num_profiles": len(profiles),
        "engine_bytes": plan.nbytes,
        "build_engine_s": round(time.monotonic() - start, 3),
        **facts,
    }


def _builder(library: Library, log: TensorRTLog) -> Any:
    try:
        return library.api.Builder(library.logger)
    except (TypeError, RuntimeError) as error:  # raised where the library cannot initialize CUDA
        raise NotPossibleHereError(
            f"{library.title} cannot build here: {log.failure() or error}. TensorRT-RTX builds without a GPU."
        ) from error


def _parsed(library: Library, builder: Any, model: Path) -> Any:
    api = library.api
    flags = 0
    if strongly_typed := getattr(api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None):
        flags = 1 << int(strongly_typed)  # newer libraries have no other kind of network
    network = builder.create_network(flags)
    parser = api.OnnxParser(network, library.logger)
    if parser.parse_from_file(str(model)):
        return network
    faults = [_fault(parser.get_error(number)) for number in range(parser.num_errors)]
    raise TuningError(explain_parser_faults(faults) or f"{library.title} refuses the model and gives no reason")


def _fault(error: Any) -> ParserFault:
    return ParserFault(error.code().name, error.node_operator(), error.node_name(), error.desc())


def _check_network(network: Any, graph: GraphSpec, profiles: Sequence[Profile]) -> None:
    """Nothing that changes between calls may have been built in, or have to be known before them."""
    specs = {one.name: spec for one, spec in zip(profiles[0].inputs, graph.inputs, strict=True)}
    for tensor in (network.get_input(number) for number in range(network.num_inputs)):
        spec = specs[tensor.name]
        for axis in spec.dynamic_axes:
            if tensor.shape[axis] >= 0:
                raise TuningError(
                    f"the model has the fixed size {tensor.shape[axis]} for `{spec.access_path}` axis {axis} "
                    f"({spec.shape[axis]}), but calls have {spec.min_shape[axis]}..{spec.max_shape[axis]}"
                )
        if tensor.is_shape_tensor:
            raise TuningError(
                f"the values of `{spec.access_path}` decide sizes inside the module, which an engine has to know "
                "before a call. Next: pass them as a plain number, or tune the modules inside this one instead."
            )


def _configured(
    library: Library, builder: Any, profiles: Sequence[Profile], options: EngineOptions, log: TensorRTLog
) -> Any:
    api, config = library.api, builder.create_builder_config()
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if options.workspace_size_bytes is not None:
        config.set_memory_pool_limit(api.MemoryPoolType.WORKSPACE, options.workspace_size_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.compatibility_level is not None:
        config.hardware_compatibility_level = getattr(
            api.HardwareCompatibilityLevel, options.compatibility_level.upper()
        )
    if options.version_compatible:
        config.set_flag(api.BuilderFlag.VERSION_COMPATIBLE)
    (config.set_flag if options.enable_tf32 else config.clear_flag)(api.BuilderFlag.TF32)
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for number, capability in enumerate(options.compute_capabilities):
            config.set_compute_capability(capability_of(library, capability), number)
    for profile in profiles:
        asked = builder.create_optimization_profile()
        for one in profile.inputs:
            asked.set_shape(one.name, one.min, one.opt, one.max)
        if config.add_optimization_profile(asked) < 0:
            raise TuningError(f"{library.title} refuses a profile: {log.failure()}")
    return config


def capability_of(library: Library, capability: str) -> Any:
    """The library's name of a compute capability, such as `8.9`.

    Raises:
        TuningError: It builds for others only.
    """
    known = getattr(library.api, "ComputeCapability", None)
    found = getattr(known, f"SM{capability.replace('.', '')}", None)
    if found is None:
        names = [name[2:] for name in getattr(known, "__members__", {}) if name.startswith("SM")]
        listed = ", ".join(f"{name[:-1]}.{name[-1]}" for name in names) or "that of the GPU it runs on"
        raise TuningError(f"{library.title} does not build for compute capability {capability}; it does for {listed}")
    return found


def _with_timings(library: Library, config: Any, path: Path | None) -> Any:
    """Let the builder use timings of earlier builds; those of other versions or devices are no use to it."""
    # TensorRT-RTX times nothing when it builds: it compiles for the GPU when an engine first runs.
    if path is None or library.name == "tensorrt_rtx":
        return None
    cache = config.create_timing_cache(SharedFile(path).read())
    if not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _keep_timings(library: Library, config: Any, path: Path | None, cache: Any) -> None:
    if path is None or cache is None:
        return

    def merged(there: bytes) -> bytes:
        if there:
            cache.combine(config.create_timing_cache(there), False)
        return bytes(cache.serialize())

    SharedFile(path).update(merged)


def _inspected(
    library: Library, plan: Any, folder: Path, profiles: Sequence[Profile], log: TensorRTLog
) -> dict[str, JsonValue]:
    """Keep the list of layers, and hold the profiles that the engine has against those that were asked for."""
    description = next((text for _, text in log.lines if text.startswith(DESCRIPTION)), "")
    facts: dict[str, JsonValue] = {}
    with library.listening() as opening:
        engine = library.api.Runtime(library.logger).deserialize_cuda_engine(plan)
    if engine is not None:
        found, facts["profiles_read_from"] = _profiles_in(library, engine), "engine"
        layers = engine.create_engine_inspector().get_engine_information(library.api.LayerInformationFormat.ONELINE)
    else:
        found, facts["profiles_read_from"], layers = _profiles_told(description), "description", description
        facts["not_opened_here"] = opening.failure() or "the runtime gives no reason"
    write_atomically(folder / LAYERS_FILE, layers or "The library told nothing of the layers.\n")
    if not found:
        # An engine that is not for this machine, from a builder that does not describe what it made.
        return {**facts, "profiles_read_from": None}
    if reason := check_read_back(profiles, found):
        raise TuningError(f"the engine is not what was asked for: {reason}")
    return {**facts, "engine_profiles": _listed(found)}


def _listed(found: Found) -> JsonValue:
    return [{name: [list(sizes) for sizes in ranges] for name, ranges in profile.items()} for profile in found]


def _profiles_in(library: Library, engine: Any) -> Found:
    """Ranges of all inputs in all profiles, as the engine itself tells them."""
    api = library.api
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT]
    return [
        {name: _ranges(engine.get_tensor_profile_shape(name, number)) for name in inputs}
        for number in range(engine.num_optimization_profiles)
    ]


def check_same_profiles(library: Library, engine: Any, record: EngineRecord) -> None:
    """Refuse an engine that has other ranges than its record.

    Raises:
        TuningError: It has.
    """
    if reason := check_read_back(record.profiles, _profiles_in(library, engine)):
        raise TuningError(f"the engine is not the one that {PROFILES_FILE} tells of: {reason}")


def _ranges(shapes: Sequence[Sequence[int]]) -> tuple[Sizes, Sizes, Sizes]:
    least, best, largest = (tuple(shape) for shape in shapes)
    return least, best, largest


def _profiles_told(description: str) -> Found:
    """The same from the builder's description of the engine, which a machine without a GPU cannot open."""
    found: Found = []
    for name, text in _TENSOR.findall(description):
        shapes: list[Mapping[str, Sizes]] = []
        for kind, sizes in _SHAPE.findall(text):
            if kind == "Min":
                shapes.append({})
            shapes[-1] = {**shapes[-1], kind: tuple(int(size) for size in sizes.split(",") if size)}
        found = found or [{} for _ in shapes]
        for profile, ranges in zip(found, shapes, strict=True):
            profile[name] = (ranges["Min"], ranges["Opt"], ranges["Max"])
    return found
