"""Torch-TensorRT ahead of time: torch.export, engines of TensorRT for its parts, all of it in one file."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field

from perfladder.backend.autocast import under_autocast
from perfladder.backend.base import Backend, BuildRequest, Built
from perfladder.backend.reasons import explain_export_failure
from perfladder.backend.torch_tensorrt_library import (
    LIBRARIES,
    TorchTensorRTConfig,
    lowers_precision,
    settings_for,
    taken_by_compile,
    told_settings,
    why_not_here,
)
from perfladder.errors import InputError, TuningError

if TYPE_CHECKING:
    import torch

    from perfladder.backend.exported import FlatBuild
    from perfladder.backend.flat import FlatModule, OutputForm
    from perfladder.tuning.graphs import GraphSpec

_FILE: Final = "model.pt2"
_ENGINE: Final = "_run_on_acc"
"""Names of the parts that the library makes engines of begin so (torch_tensorrt 2.11 to 2.14)."""


class TorchTensorRTAotBackendConfig(TorchTensorRTConfig):
    """Options of Torch-TensorRT ahead of time."""

    pickle_protocol: int = Field(
        default=2,
        ge=2,
        le=5,
        description="Of the file. torch 2.13 loads none of 4 or 5; objects above 4 GiB need these.",
    )


class TorchTensorRTAotBackend(Backend):
    """Exports the module for all sizes of the graph and makes TensorRT engines of what TensorRT can do.

    The file holds engines for this GPU and these versions, and parts that torch unpickles: an archive with it needs
    trust.
    """

    name = "torch_tensorrt_aot"
    config_class: ClassVar = TorchTensorRTAotBackendConfig
    device_types = ("cuda",)
    libraries = LIBRARIES
    writes_code = True

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers differ by design: under autocast and with lower precisions they do."""
        return lowers_precision(self.config)

    @property
    def is_portable(self) -> bool:
        """Its engines run only on the GPU and the version that they were built for."""
        return False

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: the library is missing, does not load, or refuses this GPU."""
        return super().why_not(device) or why_not_here(device)

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """Arguments that are no tensors are built in, and have to be the same in all calls."""
        from perfladder.backend.flat import why_not_flat

        return why_not_flat(graph)

    def compile(self, request: BuildRequest) -> Built:
        """Export, make engines, save and load; a build that a process before this one finished is loaded.

        Raises:
            TuningError: The module cannot be exported or compiled for all sizes of the graph.
            InputError: The installed version has no such setting.
        """
        from perfladder.backend.exported import FlatBuild
        from perfladder.backend.flat import learned_form

        if reason := self.why_not_for_graph(request.graph):
            raise TuningError(reason)
        form = learned_form(request, *request.samples[0].fresh())
        for number in form.changed:
            path = request.graph.inputs[number].access_path
            raise TuningError(f"the module changes its argument `{path}` in place, which an engine cannot")
        return self._loaded(request, FlatBuild.read(request.folder) or self._made(request), form)

    def load(self, request: BuildRequest) -> Built:
        """Load the file of an archive.

        Raises:
            TuningError: It is not there, or is of another graph.
        """
        from perfladder.backend.exported import FlatBuild

        return self._loaded(request, FlatBuild.finished(request.folder), None)

    def _made(self, request: BuildRequest) -> FlatBuild:
        from perfladder.backend.exported import FlatBuild, exported, flat_module

        library = importlib.import_module("torch_tensorrt")
        settings = settings_for(self.config, request.device, taken_by_compile(library))
        call = under_autocast(request.forward, self.config, request.graph, request.device)
        flat = flat_module(replace(request, forward=call))
        _check_devices(flat)
        program, facts = exported(flat, request.graph)
        unfinished, start = request.folder / f"unfinished_{_FILE}", time.monotonic()
        parts = self._saved(library, program, flat, request.graph, settings, unfinished)
        num_engines = sum(name.startswith(_ENGINE) for name in parts)
        if not num_engines:
            raise TuningError(
                "no part of the module became an engine, so that torch would run all of it. Next: lower "
                "`min_block_size` in compile_config, or use inductor_aot."
            )
        os.replace(unfinished, request.folder / _FILE)
        facts |= {"compile_s": round(time.monotonic() - start, 3), "num_engines": num_engines}
        facts |= {"num_torch_parts": len(parts) - num_engines, "settings": told_settings(settings)}
        facts["file_bytes"] = (request.folder / _FILE).stat().st_size
        build = FlatBuild(inputs=[one.contiguous() for one in flat.inputs], details=facts)
        build.write(request.folder)
        return build

    def _saved(
        self, library: Any, program: Any, flat: FlatModule, graph: GraphSpec, settings: dict[str, Any], path: Path
    ) -> list[str]:
        """Compile and write the file; returns the names of the parts that the program has then."""
        from perfladder.backend.exported import dynamic_sizes, quiet

        inputs = [library.Input(**wanted) for wanted in input_ranges(graph, flat.tensors)]
        try:
            with quiet():
                compiled = library.dynamo.compile(program, arg_inputs=inputs, **settings)
                library.save(
                    compiled,
                    str(path),
                    output_format="exported_program",
                    arg_inputs=list(flat.tensors),
                    dynamic_shapes=dynamic_sizes(graph) if graph.has_dynamic_axis else None,
                    pickle_protocol=self.config.pickle_protocol,
                )
        except Exception as error:
            raise TuningError(explain_export_failure(error)) from error
        return [name for name, _ in compiled.named_children()]

    def _loaded(self, request: BuildRequest, build: FlatBuild, form: OutputForm | None) -> Built:
        import torch

        from perfladder.backend.exported import check_form, quiet
        from perfladder.backend.flat import FlatCall

        check_form(build, request.graph)
        importlib.import_module("torch_tensorrt")  # which makes its operators known to torch
        try:
            # The library's own function tries TorchScript first in some versions.
            with quiet():
                program: Any = torch.export.load(str(request.folder / _FILE)).module()
        except Exception as error:
            raise TuningError(f"{_FILE} cannot be loaded: {explain_export_failure(error)}") from error

        def run(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            found = program(*tensors)
            return (found,) if isinstance(found, torch.Tensor) else tuple(found)

        return Built(FlatCall(request, build.inputs, run, form), build.details, owns_weights=form is not None)


def input_ranges(graph: GraphSpec, tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """What `torch_tensorrt.Input` is given for each tensor: the sizes of the graph, as stated where they are."""
    found: list[dict[str, Any]] = []
    for spec, tensor in zip(graph.inputs, tensors, strict=True):
        if not spec.dynamic_axes:
            found.append({"shape": tuple(tensor.shape), "dtype": tensor.dtype})
            continue
        least, preferred, largest = list(spec.min_shape), list(spec.opt_shape), list(spec.max_shape)
        for axis in spec.dynamic_axes:
            least[axis], largest[axis] = graph.size_range(spec, axis)
            times = graph.entries_for_each_sample(spec, axis)
            preferred[axis] = times * graph.get_opt_batch_size() if times is not None else preferred[axis]
        shapes = {"min_shape": tuple(least), "opt_shape": tuple(preferred), "max_shape": tuple(largest)}
        found.append({**shapes, "dtype": tensor.dtype})
    return found


def _check_devices(flat: FlatModule) -> None:
    for one in flat.inputs:
        if one.is_on_cpu:
            raise InputError(
                f"`{one.access_path}` is on the cpu, but an engine takes tensors of its GPU only: move it there before "
                "the call."
            )
