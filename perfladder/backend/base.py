"""What a backend is: it makes of a module something faster that takes the same arguments.

To add one, derive a class from `Backend` with a `name`, a `config_class` and a `compile` method, and either call
`register_backend` or declare it as an entry point of the group `perfladder.backends`, so that saved archives find it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, JsonValue, ValidationError

from perfladder.errors import InputError
from perfladder.models import Model, input_error

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfladder.tuning.graphs import GraphSpec
    from perfladder.tuning.samples import Sample


class BackendConfig(Model):
    """Options that every backend has."""

    memory_format: Literal["channels_last"] | None = Field(
        default=None, description="Weights of convolutions in this format, in a copy of the module; None: as they are."
    )


@dataclass(frozen=True, eq=False)
class BuildRequest:
    """What to make something faster of.

    Attributes:
        module: The plain module, in evaluation mode; it is not to be changed.
        forward: Its forward, to be called instead of the module, whose hooks run elsewhere.
        graph: The form of call, with the shapes that calls have.
        samples: Recorded calls of it; none when a saved archive is loaded.
        device: Where it runs.
        folder: Empty folder for what the build writes; stays, and goes into saved archives.
        shared_folder: The user's own folder for what builds leave to later ones, such as timings; None: nothing is.
    """

    module: nn.Module
    forward: Callable[..., Any]
    graph: GraphSpec
    samples: Sequence[Sample]
    device: torch.device
    folder: Path
    shared_folder: Path | None = None

    def calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments to try: those of the samples, and samples with the least and the largest sizes of the graph."""
        for sample in self.samples:
            yield sample.fresh()
        if self.graph.has_dynamic_axis and self.samples:
            for which in ("min", "max"):
                yield self.graph.at_shapes(*self.samples[0].fresh(), which)


@dataclass(frozen=True, eq=False)
class Built:
    """What a backend made.

    Attributes:
        call: Takes the arguments of the module's forward; runs without gradients.
        details: What is worth knowing of the build, for the record.
        owns_weights: It needs the plain module's weights no more.
    """

    call: Callable[..., Any]
    details: Mapping[str, JsonValue] = field(default_factory=dict)
    owns_weights: bool = False


class Backend(ABC):
    """One way to make a module faster.

    Attributes:
        name: By which archives and reports know it.
        config_class: Its options.
        device_types: Where it works.
        is_isolated: A first build is made in a process of its own, which may crash or hang.
        libraries: What its builds depend on besides torch, by the names that pip installs them by: another version is
            another build.
        writes_code: The files of its builds are code, which is loaded from an archive only where the user trusts it.
        runs_forward: What it builds runs the forward of the request, as code of this process, so that something may be
            put around that.
        compiles: It hands that forward to `torch.compile`.
        is_lossy: Its numbers differ by design, so that it needs a quality gate instead of a tolerance.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[BackendConfig]] = BackendConfig
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    is_isolated: ClassVar[bool] = True
    writes_code: ClassVar[bool] = False
    runs_forward: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: BackendConfig | None = None, **options: Any) -> None:
        """Take a config, or its fields by name.

        Raises:
            InputError: A field is wrong, or both forms are given.
        """
        if config is not None and options:
            raise InputError(f"{type(self).__name__}: give a config or options by name, not both.")
        if config is not None and not isinstance(config, self.config_class):
            raise InputError(
                f"{type(self).__name__}: config is a {type(config).__name__}, not a {self.config_class.__name__}."
            )
        if config is None:
            try:
                config = self.config_class.model_validate(options)
            except ValidationError as error:
                raise input_error(error, self.config_class, type(self).__name__) from None
        self.config: Any = config

    def __repr__(self) -> str:
        changed = self.config.model_dump(exclude_defaults=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @property
    def classes(self) -> list[type]:
        """Its own class, and those of the users' objects that it holds, which go to another process with it."""
        return [type(self)]

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers differ from eager's by design."""
        return False

    @property
    def is_portable(self) -> bool:
        """Whether it can be built again from the weights on other hardware and versions, as opposed to files."""
        return True

    def why_not(self, device: torch.device) -> str | None:
        """Why it is not applicable here, such as a library that is not installed; None if it is."""
        if device.type not in self.device_types:
            return f"it runs on {' and '.join(self.device_types)}, not on {device.type}"
        return None

    def why_not_load(self, device: torch.device) -> str | None:
        """Why a saved build cannot be used here; None if it can, also where what only a build needs is missing."""
        return self.why_not(device)

    def why_not_for(self, module: nn.Module) -> str | None:
        """Why it is not applicable to a module; None if it is."""
        return None

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """Why it is not applicable to a form of call; None if it is."""
        return None

    @abstractmethod
    def compile(self, request: BuildRequest) -> Built | Callable[..., Any]:
        """Make something that takes the arguments of the module's forward and returns what it returns.

        Whatever is raised is recorded as the reason why this backend failed.
        """

    def load(self, request: BuildRequest) -> Built | Callable[..., Any]:
        """Make it again for a saved archive, whose files of the build are in `request.folder`."""
        return self.compile(request)

    def build(self, request: BuildRequest, *, is_saved: bool = False) -> Built:
        """Make it, with the options that every backend has; `is_saved` takes it from the files of an archive."""
        make = self.load if is_saved else self.compile
        if self.config.memory_format is None:
            return _as_built(make(request))
        import torch

        module = copy.deepcopy(request.module)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        built = _as_built(make(replace(request, module=module, forward=module.forward)))
        return replace(built, call=_contiguous_outputs(built.call), owns_weights=True)


def why_no_graphs(device: torch.device) -> str | None:
    """Why there are no CUDA graphs on a device; None if there are."""
    return None if device.type == "cuda" else f"CUDA graphs need an NVIDIA GPU, and this is {device.type}"


def _as_built(made: Built | Callable[..., Any]) -> Built:
    return made if isinstance(made, Built) else Built(made)


def _contiguous_outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Give outputs the layout that the plain module's have, which code after it may rely on (as `view` does)."""
    import torch

    from perfladder.tuning.tree import map_tensors

    def restored(tensor: torch.Tensor) -> torch.Tensor:
        is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        return tensor.contiguous() if is_last else tensor

    def contiguous(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return restored(result) if isinstance(result, torch.Tensor) else map_tensors(result, restored)

    return contiguous
