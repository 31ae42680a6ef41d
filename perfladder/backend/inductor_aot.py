"""Inductor ahead of time: torch.export, then machine code in one file that needs no compiler when it is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field, JsonValue

from perfladder.backend.base import Backend, BackendConfig, BuildRequest, Built
from perfladder.backend.inductor_jit import inductor_is_missing
from perfladder.backend.reasons import explain_export_failure
from perfladder.errors import TuningError

if TYPE_CHECKING:
    import torch

    from perfladder.backend.exported import FlatBuild
    from perfladder.backend.flat import OutputForm
    from perfladder.tuning.graphs import GraphSpec

_FILE: Final = "model.pt2"


class TorchInductorAotBackendConfig(BackendConfig):
    """Options of Inductor ahead of time."""

    inductor_configs: dict[str, JsonValue] | None = Field(
        default=None, description="Settings of Inductor by name, such as {'max_autotune': True}."
    )


class TorchInductorAotBackend(Backend):
    """Exports the module for all sizes of the graph and compiles it to a file of machine code.

    The file is code for this kind of device and these versions, so that an archive needs trust to load it.
    """

    name = "inductor_aot"
    config_class: ClassVar = TorchInductorAotBackendConfig
    writes_code = True

    @property
    def is_portable(self) -> bool:
        """Its file runs only where it was built."""
        return False

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: Inductor needs a C++ compiler on a CPU, and Triton on a GPU."""
        return super().why_not(device) or inductor_is_missing(device)

    def why_not_load(self, device: torch.device) -> str | None:
        """A finished file needs no compiler."""
        return super().why_not(device)

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """Arguments that are no tensors are built in, and have to be the same in all calls."""
        from perfladder.backend.flat import why_not_flat

        return why_not_flat(graph)

    def compile(self, request: BuildRequest) -> Built:
        """Export, compile and load; a build that a process before this one finished in the folder is loaded.

        Raises:
            TuningError: The module cannot be exported or compiled for all sizes of the graph.
        """
        from perfladder.backend.exported import FlatBuild
        from perfladder.backend.flat import learned_form

        if reason := self.why_not_for_graph(request.graph):
            raise TuningError(reason)
        form = learned_form(request, *request.samples[0].fresh())
        return self._loaded(request, FlatBuild.read(request.folder) or self._made(request), form)

    def load(self, request: BuildRequest) -> Built:
        """Load the file of an archive.

        Raises:
            TuningError: It is not there, or is of another graph.
        """
        from perfladder.backend.exported import FlatBuild

        return self._loaded(request, FlatBuild.finished(request.folder), None)

    def _made(self, request: BuildRequest) -> FlatBuild:
        from perfladder._torch_private import compile_to_package
        from perfladder.backend.exported import FlatBuild, exported, flat_module, quiet

        flat = flat_module(request)
        program, facts = exported(flat, request.graph)
        unfinished, start = request.folder / f"unfinished_{_FILE}", time.monotonic()
        try:
            with quiet():
                compile_to_package(program, str(unfinished), self._options())
        except Exception as error:
            raise TuningError(explain_export_failure(error)) from error
        os.replace(unfinished, request.folder / _FILE)
        facts["compile_s"] = round(time.monotonic() - start, 3)
        facts["file_bytes"] = (request.folder / _FILE).stat().st_size
        build = FlatBuild(inputs=flat.inputs, details=facts)
        build.write(request.folder)
        return build

    def _options(self) -> dict[str, Any] | None:
        return dict(self.config.inductor_configs) if self.config.inductor_configs is not None else None

    def _loaded(self, request: BuildRequest, build: FlatBuild, form: OutputForm | None) -> Built:
        from perfladder._torch_private import load_package
        from perfladder.backend.exported import check_form
        from perfladder.backend.flat import FlatCall

        check_form(build, request.graph)
        try:
            run: Callable[[list[torch.Tensor]], Any] = load_package(str(request.folder / _FILE), request.device)
        except Exception as error:
            raise TuningError(f"{_FILE} cannot be loaded: {explain_export_failure(error)}") from error
        return Built(FlatCall(request, build.inputs, run, form), build.details, owns_weights=form is not None)
