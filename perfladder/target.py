"""Load the user's object from its factory, and run the workload's call on it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from perfladder.checksums import Checksums
from perfladder.distributed import RankGroup, RankPlace, initialize_default_group, rank_device
from perfladder.environment import (
    Environment,
    GitState,
    Snapshot,
    collect_environment,
    git_state,
    take_snapshot,
)
from perfladder.errors import InputError, NotPossibleHereError, WorkloadError
from perfladder.files import cache_folder
from perfladder.models import Model
from perfladder.object_parts import attribute_at, named_modules_of, paths_of, set_attribute_at
from perfladder.progress import Progress
from perfladder.stage_alone import Holder, stage_alone
from perfladder.user_code import RunOutput, check_arguments, consume, find_callable, parameter_names, user_code
from perfladder.workload import SDPA_BACKENDS, Fingerprints, TunedArchive, Workload

if TYPE_CHECKING:
    import torch


class LoadRequest(Model):
    """Load the session's workload."""

    only: str | None = Field(default=None, description="A stage to be alone: the rest is dropped once it is built.")


class PreloadRequest(Model):
    """Import the module of the target's factory, and build nothing."""


class Preloaded(Model):
    """How long the import took."""

    import_s: float


class LoadedInfo(Model):
    """What a session found when it loaded the target."""

    target_type: str
    device: str
    dtypes: list[str]
    num_parameters: int
    attention_backend: str
    compiled_modules: list[str]
    tuned_modules: list[str] = Field(default=[], description="Those that an archive serves.")
    load_s: dict[str, float]
    environment: Environment
    snapshot: Snapshot
    git: GitState
    fingerprints: Fingerprints
    description: str | None = Field(default=None, description="What a script's call is, and where it is made.")
    rank_devices: list[str] = Field(default=[], description="The device of each rank, where there are several.")

    @classmethod
    def of_ranks(cls, found: Sequence[LoadedInfo]) -> LoadedInfo:
        """Rank 0's, with the devices of all, and for each part of the load the time of the slowest."""
        load_s = {part: max(info.load_s[part] for info in found) for part in found[0].load_s}
        return found[0].model_copy(update={"load_s": load_s, "rank_devices": [info.device for info in found]})

    @property
    def devices(self) -> list[str]:
        """Every device that the target runs on, once."""
        return sorted(set(self.rank_devices or [self.device]))

    @property
    def lock_names(self) -> list[str]:
        """Names of these devices that are the same in every process, in the one order in which they are locked."""
        names = []
        for device in self.devices:
            index = int(device.partition(":")[2] or 0)
            names.append("cpu" if device == "cpu" else (self.environment.devices[index].uuid or device))
        return sorted(names)


@dataclass(frozen=True)
class Placed:
    """What a factory returns that has chosen the device itself, as a script has: nothing is moved.

    Attributes:
        obj: The object to profile.
        device: Where it computes.
        inputs: What the call takes besides the workload's own inputs; copied for each run.
        description: What it is, in words.
    """

    obj: Any
    device: torch.device
    inputs: Mapping[str, Any] = field(default_factory=dict)
    description: str | None = None


class LoadedTarget:
    """The workload's object in this process: loaded once, called many times.

    Args:
        workload: What to run.
        base_dir: Where relative paths and the user's modules are looked up.
        place: Which rank this process is, if it is one of several.

    Attributes:
        tell: Where long measurements tell how far they are; a session's child passes it on to its parent.
    """

    def __init__(self, workload: Workload, base_dir: Path, place: RankPlace | None = None) -> None:
        self.workload = workload
        self.base_dir = base_dir
        self.place = place
        self.tell: Callable[[Progress], None] = lambda _: None
        self._ranks: RankGroup | None = None
        self.obj: Any = None
        self.device: torch.device = None  # type: ignore[assignment]  # set by load()
        self.compiled_modules: list[str] = []
        self.tuned_modules: list[str] = []
        self._call: Callable[..., Any] = None  # type: ignore[assignment]  # set by load()
        self._inputs: dict[str, dict[str, Any]] = {}
        self._prepared: dict[str, dict[str, Any]] = {}
        self._placed: Placed | None = None

    @classmethod
    def of(
        cls, obj: Any, workload: Workload, base_dir: Path | None = None, *, inputs: Mapping[str, Any] | None = None
    ) -> LoadedTarget:
        """Wrap an object that is already there, as a notebook has it; `inputs` replace the workload's, as they are."""
        loaded = cls(workload, base_dir or Path.cwd())
        loaded.obj, loaded.device = obj, resolve_device(workload.device)
        if inputs is not None:
            loaded._inputs[""] = dict(inputs)
        loaded._prepare_call()
        return loaded

    def replace_object(self, obj: Any) -> None:
        """Call another object from now on, which takes what the target takes, such as a wrapper of it."""
        self.obj = obj
        self._prepare_call()

    def change_call(self, call: str | None, inputs: Mapping[str, JsonValue]) -> None:
        """Make another call from now on.

        Raises:
            InputError: The target has no such call, or it does not take these inputs.
        """
        self.workload = self.workload.model_copy(update={"call": call, "inputs": dict(inputs)})
        self._inputs.clear()
        self._prepared.clear()
        self._prepare_call()

    def preload(self) -> float:
        """Import torch and the module of the factory; returns the seconds it took."""
        start = time.perf_counter()
        self._import_path()
        importlib.import_module("torch")
        find_callable(self.workload.target, self.base_dir, field_name="target")
        return time.perf_counter() - start

    def load(self, only: str | None = None, *, prepares_call: bool = True) -> dict[str, float]:
        """Import, build, move and compile the target; returns the seconds of each.

        Args:
            only: A stage: the rest is dropped as soon as the target is built, before anything is moved to the device,
                and the workload's call cannot be made.
            prepares_call: Whether the call is looked up and its inputs are made; it cannot be made otherwise.
        """
        if self.workload.nproc > 1 and self.place is None:
            raise NotPossibleHereError(
                "nproc: several ranks cannot run in this one process; use a session or the command."
            )
        seconds: dict[str, float] = {}
        with _seconds(seconds, "import"):
            self._import_path()
            self.device = resolve_device(self.workload.device)
            if self.place is not None:
                self.device = rank_device(self.workload.device, self.device, self.place)
            factory = find_callable(self.workload.target, self.base_dir, field_name="target")
        with _seconds(seconds, "build"):
            self._seed()
            built, takes = self._build(factory)
            if only is not None:
                built = stage_alone(built, only)
        with _seconds(seconds, "move"):
            self.obj = self._move(built, takes)
        with _seconds(seconds, "compile"):
            self._compile(only)
        if self.workload.tuned is not None:
            with _seconds(seconds, "tuned"):
                self._load_tuned(self.workload.tuned, only)
        self._check_attention_backend(is_whole=only is None)
        if only is None and prepares_call:
            self._prepare_call()
        if self.place is not None:
            with _seconds(seconds, "ranks"):
                initialize_default_group(self.device, self.workload.timeout_s)
                self._ranks = self._ranks or RankGroup(self.place, timeout_s=self.workload.timeout_s)
        return seconds

    def inputs(self, scenario: str | None = None) -> dict[str, Any]:
        """The call's keyword arguments, with the scenario's overrides; tensors are made once."""
        key = scenario or ""
        if key not in self._inputs:
            given = self.workload.input_set(scenario).inputs
            made = {name: self._materialise(name, value) for name, value in given.items()}
            self._inputs[key] = {**(self._placed.inputs if self._placed else {}), **made}
        return self._inputs[key]

    def run(self, scenario: str | None = None, *, clock: Callable[[], int] = time.perf_counter_ns) -> RunOutput:
        """Call the workload once, without gradients, and consume what it streams.

        Args:
            scenario: Whose inputs to use; by default the workload's own.
            clock: Tells when each streamed item arrived, in ns.

        Raises:
            WorkloadError: The user's code raised.
        """
        import torch

        inputs = self._prepared.pop(scenario or "", None) or self._fresh_inputs(scenario)
        with user_code("The workload's call"), torch.no_grad(), self.attention():
            return consume(self._call(**inputs), clock)

    def prepare_run(self, scenario: str | None = None) -> None:
        """Seed all generators and copy the inputs, so that runs do the same work; call it outside the timed part.

        Where there are ranks, it returns when all have come this far, so every rank must do the same number of runs.
        """
        self._prepared = {scenario or "": self._fresh_inputs(scenario)}
        self._seed()
        self.synchronize()
        if self._ranks is not None:
            self._ranks.start_together()

    def agreed(self, value: float) -> float:
        """Rank 0's value on every rank: how many runs there are must not follow from one rank's own measurement."""
        return value if self._ranks is None else self._ranks.agree(value)

    def own_path(self, path: Path) -> Path:
        """Where this process writes a file that every rank has."""
        return path if self.place is None else self.place.own_path(path)

    def new_request(self) -> Callable[[], Any]:
        """The call with inputs of its own, to start on any thread; it gives what the call returns, not yet consumed.

        Whoever starts it sees to `torch.no_grad()` on that thread and to `attention()`, which holds for the process.
        """
        inputs = self._fresh_inputs(None)
        return lambda: self._call(**inputs)

    def _fresh_inputs(self, scenario: str | None) -> dict[str, Any]:
        """A copy of the inputs: a run that changes its own in place must not change the next one's."""
        return copy.deepcopy(self.inputs(scenario))

    def synchronize(self) -> None:
        """Wait for the device; nothing to do on a CPU."""
        if self.device.type != "cpu":
            import torch

            torch.accelerator.synchronize(self.device)

    @property
    def activities(self) -> tuple[str, ...]:
        """What a profiler records for this target: the host, and the device's type where it is not the CPU."""
        return ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)

    def info(self, load_s: dict[str, float]) -> LoadedInfo:
        """Describe what was loaded."""
        from torch.nn.parameter import is_lazy

        modules = [module for _, module in named_modules_of(self.obj)]
        parameters = {id(p): p for module in modules for p in module.parameters() if not is_lazy(p)}.values()
        git = git_state(self.base_dir)
        return LoadedInfo(
            target_type=f"{type(self.obj).__module__}.{type(self.obj).__qualname__}",
            device=str(self.device),
            dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            num_parameters=sum(p.numel() for p in parameters),
            attention_backend=self.workload.attention_backend or "default",
            compiled_modules=self.compiled_modules,
            tuned_modules=self.tuned_modules,
            load_s=load_s,
            environment=collect_environment(os.environ),
            snapshot=take_snapshot(),
            git=git,
            fingerprints=Fingerprints.of(self.workload, **git.as_configuration()),
            description=self._placed.description if self._placed else None,
        )

    def _import_path(self) -> None:
        """The user's modules are found from the workload's folder and from where the command was given."""
        for folder in (str(Path.cwd()), str(self.base_dir)):
            if folder not in sys.path:
                sys.path.insert(0, folder)

    def _seed(self) -> None:
        import numpy as np
        import torch

        random.seed(self.workload.seed)
        np.random.seed(self.workload.seed % 2**32)
        torch.manual_seed(self.workload.seed)

    def _build(self, factory: Callable[..., Any]) -> tuple[Any, set[str]]:
        """Call the factory; tells as well which of device and dtype it took care of."""
        arguments: dict[str, Any] = dict(self.workload.target_args)
        names = parameter_names(factory)
        takes: set[str] = {name for name in ("device", "dtype") if name in names}
        if "device" in takes:
            arguments.setdefault("device", str(self.device))
        if "dtype" in takes and self.workload.dtype:
            arguments.setdefault("dtype", self.workload.dtype)
        check_arguments(factory, arguments, where="target_args", what=f"the factory {self.workload.target}")
        with user_code(f"The factory {self.workload.target}"):
            obj = factory(**arguments)
        if obj is None:
            raise WorkloadError(
                f"The factory {self.workload.target} returned None; it must return the object to profile."
            )
        if isinstance(obj, Placed):
            self._take_device_of(obj)
            self._placed = obj
            return obj.obj, takes | {"device"}
        return obj, takes

    def _take_device_of(self, placed: Placed) -> None:
        name = str(placed.device)
        if self.workload.device != "auto" and self.device != resolve_device(name):
            raise InputError(
                f"device: {self.workload.device!r} was asked for, and the target puts itself on {name}. Leave the "
                "field out, or change the script."
            )
        self.device = resolve_device(name)

    def _move(self, obj: Any, handled: set[str]) -> Any:
        """Bring the object to the device and dtype that its factory did not take care of."""
        import torch

        wanted: dict[str, Any] = {}
        if "device" not in handled and (self.device.type != "cpu" or self.workload.device != "auto"):
            wanted["device"] = self.device
        if "dtype" not in handled and self.workload.dtype:
            wanted["dtype"] = getattr(torch, self.workload.dtype)
        if not wanted:
            return obj
        if isinstance(obj, Holder):
            stage = obj.content
            if isinstance(stage, torch.nn.Module):
                stage.to(**wanted)
            return obj
        if callable(getattr(type(obj), "to", None)):
            with user_code("The target's .to()"):
                moved = obj.to(**wanted)
                return obj if moved is None else moved
        if wanted.get("device", torch.device("cpu")).type == "cpu" and "dtype" not in wanted:
            return obj
        raise InputError(
            f"The target ({type(obj).__name__}) has no .to(), so it cannot be brought to {wanted}. "
            "Let its factory accept 'device' and 'dtype', or leave these fields out."
        )

    def _compile(self, only: str | None = None) -> None:
        """Replace modules by `torch.compile` wrappers; hooks on a wrapper run outside the compiled graph."""
        config = self.workload.compile
        if config is None:
            return
        import torch

        paths = config.only or [path for path, _ in named_modules_of(self.obj)]
        if only is not None:
            paths = [path for path in paths if f"{only}.".startswith(f"{path}.") or path.startswith(f"{only}.")]
        for path in paths:
            module = attribute_at(self.obj, path, field_name="compile.only")
            if not isinstance(module, torch.nn.Module):
                raise InputError(f"compile.only: {path!r} is a {type(module).__name__}, not a torch.nn.Module.")
            compiled = torch.compile(module, mode=config.mode)
            if path == "":
                self.obj = compiled
            else:
                for name in dict.fromkeys([path, *paths_of(self.obj, module)]):
                    set_attribute_at(self.obj, name, compiled, field_name="compile.only")
            self.compiled_modules.append(path)

    def _load_tuned(self, tuned: TunedArchive, only: str | None) -> None:
        """Put the archive's modules in place; of a stage alone those that it is or holds."""
        from perfladder.tuning.archive_names import find_archive
        from perfladder.tuning.checkpoint_load import list_modules, load
        from perfladder.tuning.timesteps import host_timesteps_in
        from perfladder.tuning.wrap import wrapped_in
        from perfladder.workloads import is_builtin_folder

        folder = None if is_builtin_folder(self.base_dir) else self.base_dir
        archive = find_archive(tuned.archive, folder, field_name="tuned.archive").absolute()
        sums = Checksums(cache_folder(os.environ))
        if tuned.sha256 is not None and sums.of(archive) not in (tuned.sha256, None):
            raise InputError(f"tuned.sha256: {archive} is another archive. Leave the sum out, or name the one meant.")
        paths = None
        if only:
            paths = [path for path in list_modules(archive) if f"{path}.".startswith(f"{only}.")]
        if paths != []:
            self.obj = load(self.obj, archive, modules=paths, trust=tuned.trust, disable_external_logging=False)
            wrapped = {control.path or "" for control in wrapped_in(self.obj)}
            self.tuned_modules = paths or sorted(wrapped | set(host_timesteps_in(self.obj)))

    def _check_attention_backend(self, *, is_whole: bool) -> None:
        """Set a diffusers attention backend; refuse one that cannot serve here, instead of falling back."""
        name = self.workload.attention_backend
        if name is None or self._sdpa_backend() is not None:
            return
        setters: list[Any] = [m for _, m in named_modules_of(self.obj) if hasattr(m, "set_attention_backend")]
        if not setters and not is_whole:
            return
        if not setters:
            raise InputError(
                f"attention_backend: {name!r} is none of {', '.join(SDPA_BACKENDS)}, and no module of the target has "
                "set_attention_backend()."
            )
        for module in setters:
            try:
                module.set_attention_backend(name)
            except (ValueError, RuntimeError, ImportError) as error:
                raise NotPossibleHereError(f"attention_backend: {name!r} cannot be used here: {error}") from error

    def _sdpa_backend(self) -> Any:
        name = self.workload.attention_backend
        if name not in SDPA_BACKENDS:
            return None
        if self.device.type == "cpu" and name not in ("flash", "math"):
            raise NotPossibleHereError(
                f"attention_backend: {name!r} does not run on cpu; there are 'flash' and 'math'."
            )
        from torch.nn.attention import SDPBackend

        return {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }[name]

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """The asked backend of scaled_dot_product_attention, in force inside the block."""
        backend = self._sdpa_backend()
        if backend is None:
            return contextlib.nullcontext()
        from torch.nn.attention import sdpa_kernel

        return sdpa_kernel([backend])

    def _prepare_call(self) -> None:
        call = self.workload.call
        if call is None:
            if not callable(self.obj):
                raise InputError(
                    f"call: the target ({type(self.obj).__name__}) is not callable; name a method, or module:function."
                )
            self._call, found, what = self.obj, self.obj, "the target"
        elif ":" in call:
            function = find_callable(call, self.base_dir, field_name="call")
            self._call, found, what = (lambda **inputs: function(self.obj, **inputs)), function, ""
        else:
            found, what = attribute_at(self.obj, call, field_name="call"), f"the target's {call}"
            if not callable(found):
                raise InputError(f"call: {call!r} is a {type(found).__name__} and cannot be called.")
            # Looked up at each call, so that the method itself can be observed too.
            self._call = lambda **inputs: attribute_at(self.obj, call, field_name="call")(**inputs)
        for scenario in (None, *self.workload.scenario_names):
            inputs = self.inputs(scenario)
            if what:
                where = f"scenarios.{scenario}" if scenario else "inputs"
                check_arguments(found, inputs, where=where, what=what)

    def _materialise(self, name: str, value: JsonValue) -> Any:
        """Make the tensors that `{$tensor: [1, 3, 8, 8], dtype: float32, fill: normal}` asks for, in containers too."""
        if isinstance(value, list):
            return [self._materialise(f"{name}.{index}", inner) for index, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "$tensor" not in value:
            return {key: self._materialise(f"{name}.{key}", inner) for key, inner in value.items()}
        # Two inputs of one shape must not hold the same numbers.
        seed = self.workload.seed + zlib.crc32(name.encode())
        return make_tensor(value, device=self.device, seed=seed, field_name=f"inputs.{name}")


def load(loaded: LoadedTarget, request: LoadRequest) -> LoadedInfo:
    """Load the session's target and describe it."""
    return loaded.info(loaded.load(request.only))


def preload(loaded: LoadedTarget, request: PreloadRequest) -> Preloaded:
    """Import what the target will need, so that a later load is short."""
    return Preloaded(import_s=loaded.preload())


def resolve_device(name: str) -> torch.device:
    """The device that a workload asks for; `auto` is the accelerator where there is one, else the CPU.

    Raises:
        InputError: torch knows no such device type.
        NotPossibleHereError: This machine has no such device; never a silent run on the CPU.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device: {name!r} is no device type of torch. Use 'auto', 'cpu' or 'cuda'.") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        there = accelerator.type if accelerator else "no accelerator"
        raise NotPossibleHereError(
            f"device: {name!r} was asked for, but torch {torch.__version__} sees {there} on this machine. "
            "Set 'device: auto' or 'device: cpu' to run without it; `perfladder doctor` shows what is there."
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise NotPossibleHereError(f"device: {name!r} was asked for, but there are only {count} {device.type} devices.")
    return torch.device(device.type, device.index or 0)


def make_tensor(spec: dict[str, Any], *, device: torch.device, seed: int, field_name: str) -> torch.Tensor:
    """Make an input tensor from `{$tensor: shape, dtype: float32, fill: normal | zeros | ones | arange}`.

    The values depend on the seed only, not on the device.

    Raises:
        InputError: An unknown key, dtype or fill, or a shape that is no list of sizes.
    """
    import torch

    if unknown := set(spec) - {"$tensor", "dtype", "fill"}:
        raise InputError(
            f"{field_name}: unknown keys {sorted(unknown)}; a tensor has '$tensor' (its shape), 'dtype', 'fill'."
        )
    shape, dtype_name, fill = spec["$tensor"], spec.get("dtype", "float32"), spec.get("fill", "normal")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise InputError(f"{field_name}: '$tensor' must be a list of sizes, such as [1, 3, 224, 224], not {shape!r}.")
    dtype = getattr(torch, str(dtype_name), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{field_name}: dtype {dtype_name!r} is no dtype of torch, such as float32 or int64.")
    generator = torch.Generator().manual_seed(seed)
    fills: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: torch.randn(shape, generator=generator),
        "zeros": lambda: torch.zeros(shape),
        "ones": lambda: torch.ones(shape),
        "arange": lambda: torch.arange(torch.Size(shape).numel()).reshape(shape),
    }
    if fill not in fills:
        raise InputError(f"{field_name}: fill {fill!r} is unknown; accepted: {', '.join(fills)}.")
    try:
        return fills[fill]().to(device=device, dtype=dtype)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise InputError(
            f"{field_name}: a tensor of shape {shape} and dtype {dtype_name} cannot be made: {error}"
        ) from error


@contextlib.contextmanager
def _seconds(into: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    into[name] = time.perf_counter() - start
