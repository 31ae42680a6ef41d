"""TensorRT engines by themselves: built on one machine, as in CI without a GPU, and run on another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import JsonValue, ValidationError

from perfladder.backend.tensorrt import TensorRTBackend
from perfladder.errors import InputError, NotPossibleHereError, TuningError
from perfladder.files import write_atomically
from perfladder.models import Model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfladder.backend.base import BuildRequest
    from perfladder.tuning.dims import SemanticPath, Shape

_GRAPH_FILE: Final = "graph.json"


class EngineBuild(Model):
    """An engine that was built.

    Attributes:
        folder: With all that `load_engine` needs.
        plan: The engine itself.
        details: What is known of it; `engine_profiles` are the ranges that it has.
    """

    folder: Path
    plan: Path
    details: dict[str, JsonValue]


def build_engine(
    module: nn.Module,
    samples: Sequence[Any],
    folder: str | Path,
    *,
    dynamic_shapes: Mapping[SemanticPath, Shape] | None = None,
    backend: TensorRTBackend | None = None,
) -> EngineBuild:
    """Build an engine without running it; with TensorRT-RTX no GPU is needed.

    Args:
        module: In evaluation mode, on any device.
        samples: Its calls: each a tensor, positional arguments, keyword arguments, or a pair of both. An axis whose
            size differs between them ranges from the least to the largest.
        folder: For what is written; new or empty.
        dynamic_shapes: Sizes that samples do not show, as `pl.Module` takes them.
        backend: With options other than the defaults.

    Raises:
        InputError: The module is none, the folder is not empty, or samples are of several forms.
        NotPossibleHereError: A library is missing.
        TuningError: The module cannot be built for all sizes.
    """
    from perfladder.backend.trt_build import PLAN_FILE

    backend = backend or TensorRTBackend()
    _check_module(module)
    if module.training:
        raise InputError("module: it is in training mode; call eval() first.")
    where = _new_folder(folder)
    request = _recorded(module, samples, where, dynamic_shapes)
    build = backend.build_engine(request)
    write_atomically(where / _GRAPH_FILE, request.graph.to_model().model_dump_json())
    return EngineBuild(folder=where, plan=where / PLAN_FILE, details=build.details)


def load_engine(
    module: nn.Module,
    folder: str | Path,
    *,
    device: str | torch.device = "cuda",
    backend: TensorRTBackend | None = None,
) -> Callable[..., Any]:
    """Open an engine that `build_engine` made, on a machine with the GPU it is for.

    The engine is code that the library runs: load only what you trust.

    Args:
        module: The plain one on that device; its first call shows how results are put together.
        folder: What `build_engine` wrote.
        device: Where to run.
        backend: With options that count when an engine runs, such as `use_cuda_graphs`.

    Returns:
        What takes the arguments of the module's forward and returns what it does.

    Raises:
        InputError: The module or the device is none.
        NotPossibleHereError: A library is missing, or the runtime refuses the GPU.
        TuningError: The folder holds no whole build, or the runtime refuses the engine.
    """
    import torch

    from perfladder.backend.base import BuildRequest
    from perfladder.tuning.graph import GraphModel, GraphSpec

    backend, where = backend or TensorRTBackend(), Path(folder)
    _check_module(module)
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InputError(f"device: expected one such as 'cuda' or 'cuda:1', got {device!r}.") from None
    try:
        graph = GraphSpec.from_model(GraphModel.model_validate_json((where / _GRAPH_FILE).read_bytes()))
    except OSError as error:
        raise TuningError(f"{where} holds no build of build_engine: {_GRAPH_FILE}: {error.strerror}.") from None
    except ValidationError:
        raise TuningError(f"{where / _GRAPH_FILE} is damaged. Build the engine again.") from None
    if reason := backend.why_not(place):
        raise NotPossibleHereError(f"The engine cannot run here: {reason}.")
    request = BuildRequest(module, module.forward, graph, (), place, where, _shared_folder())
    return backend.load(request).call


def _check_module(module: object) -> None:
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected a torch.nn.Module, not a {type(module).__name__}.")


def _new_folder(folder: str | Path) -> Path:
    where = Path(folder)
    try:
        where.mkdir(parents=True, exist_ok=True)
        is_empty = not any(where.iterdir())
    except OSError as error:
        raise InputError(f"folder: {where} cannot be made or read ({error.strerror}).") from None
    if not is_empty:
        raise InputError(f"folder: {where} is not empty. Choose a new one for each engine.")
    return where


def _recorded(
    module: nn.Module,
    samples: Sequence[Any],
    folder: Path,
    dynamic_shapes: Mapping[SemanticPath, Shape] | None,
) -> BuildRequest:
    """The samples as calls of one graph."""
    import torch

    from perfladder.backend.base import BuildRequest
    from perfladder.tuning.dataset import as_call
    from perfladder.tuning.graphs import GraphTable
    from perfladder.tuning.samples import Sample
    from perfladder.tuning.tree import parameter_names

    if isinstance(samples, (torch.Tensor, str, Mapping)) or not len(samples):
        raise InputError("samples: expected a list of calls, with one of them at least.")
    table = GraphTable(parameter_names(module.forward), strict=True, limit=1, dynamic_shapes=dynamic_shapes)
    recorded = []
    for sample in samples:
        taken = Sample.of(*as_call(sample), None)
        graph = table.observe(taken.args, taken.kwargs)
        args, kwargs = taken.fresh()
        with torch.no_grad():
            table.observe_output(graph, module(*args, **kwargs))
        recorded.append(taken)
    table.check_dynamic_paths()
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    return BuildRequest(module, module.forward, graph, recorded, device, folder, _shared_folder())


def _shared_folder() -> Path:
    from perfladder.tuning.cache import BuildCache
    from perfladder.tuning.config import config

    return BuildCache(config.cache_dir).shared_folder
