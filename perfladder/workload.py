"""What to run: a workload file (YAML) as a checked, frozen model, and its three fingerprints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from perfladder.errors import InputError
from perfladder.models import Model, digest, input_error
from perfladder.sweep import Sweep, with_value
from perfladder.text import near_names

Metric = Literal["latency_p50", "latency_p95", "throughput", "cadence_p95", "peak_memory", "cold_start"]
DType = Literal["float32", "float16", "bfloat16", "float64"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

SDPA_BACKENDS = ("flash", "efficient", "cudnn", "math")
"""Attention backends of `torch.nn.functional.scaled_dot_product_attention` that a workload may ask for."""

MIN_COLD_LAUNCHES = 3
"""Process launches for the metric `cold_start`, which has one sample a launch."""

Site = Annotated[str, Field(min_length=1, description="Dotted path on the target, such as unet or vae.decode.")]


_MAX_RUNS = 1_000_000
_MAX_TIMEOUT_S = 7 * 24 * 3600.0


class Media(Model):
    """What one chunk of a streamed output stands for, to judge whether it arrives in time."""

    frames_per_chunk: int = Field(gt=0)
    fps: float = Field(gt=0, description="Frames a second at which the viewer plays.")
    margin_ms: float = Field(default=0.0, ge=0, description="Kept free for encoding and transport.")

    @property
    def chunk_ms(self) -> float:
        """Media time in one chunk, in ms."""
        return 1000.0 * self.frames_per_chunk / self.fps


class CompileConfig(Model):
    """How `torch.compile` is applied before anything is measured."""

    mode: CompileMode = "default"
    only: list[Site] | None = Field(default=None, description="Modules to compile; by default every stage module.")


class TunedArchive(Model):
    """Tuned modules that are put into the target before anything is measured."""

    archive: str = Field(
        min_length=1,
        description="As `perfladder tune --save` wrote it; relative to this file, of a built-in workload to the "
        "current folder. One without a folder is looked for in `checkpoints` too.",
    )
    sha256: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="Of the archive: another one is refused."
    )
    trust: bool = Field(default=False, description="Also use files in it that are code, as some backends write.")


class InputSet(NamedTuple):
    """The inputs of one scenario, whole, and how many items one call with them makes."""

    inputs: dict[str, JsonValue]
    items_per_call: int


ITEMS_KEY = "$items_per_call"
"""In a scenario: its own number of items; no keyword argument can have this name."""


class Budget(Model):
    """What one rung may cost; a rung that is estimated to cost more is asked for at a terminal, and else skipped."""

    max_rung_time_s: float | None = Field(default=None, gt=0)
    max_rung_disk_bytes: int | None = Field(default=None, gt=0)
    max_rung_memory_bytes: int | None = Field(
        default=None, gt=0, description="Of the device, or on a CPU of the process."
    )


class Workload(Model):
    """One fixed piece of work. Defaults are safe on a laptop CPU."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    target: str = Field(description="module:factory or file.py:factory; the factory returns the object to profile.")
    target_args: dict[str, JsonValue] = Field(default_factory=dict)
    call: str | None = Field(
        default=None, description="A dotted path on the object, or module:function(obj, **inputs)."
    )
    inputs: dict[str, JsonValue] = Field(default_factory=dict)
    scenarios: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    sweep: Sweep | None = None
    metric: Metric = "latency_p50"
    items_per_call: int = Field(default=1, gt=0)
    media: Media | None = None
    stages: Literal["auto"] | list[Site] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|[a-z]+(:\d+)?)$")
    dtype: DType | None = None
    attention_backend: str | None = None
    compile: CompileConfig | None = None
    tuned: TunedArchive | None = None
    model: str | None = None
    task: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    warmup_runs: int = Field(default=3, ge=0, le=_MAX_RUNS)
    warmup_limit: int = Field(
        default=20, ge=0, description="The most runs that may be called warm-up when the measured ones begin too early."
    )
    measured_runs: int = Field(default=10, gt=0, le=_MAX_RUNS)
    require_idle_device: bool = Field(
        default=False, description="Refuse to measure while others use the device or the machine is busy."
    )
    launches: int | None = Field(default=None, gt=0, description="Processes that rung 1 is repeated in.")
    concurrency: list[Annotated[int, Field(gt=0, le=1024)]] = Field(
        default=[], description="Numbers of requests at once; each is a closed loop of its own."
    )
    timeout_s: float = Field(default=600.0, gt=0, le=_MAX_TIMEOUT_S, description="Limit for loading and for each rung.")
    budget: Budget | None = None
    nproc: int = Field(default=1, gt=0)

    @field_validator("target")
    @classmethod
    def _target_names_a_factory(cls, value: str) -> str:
        module, separator, factory = value.rpartition(":")
        if not separator or not module or not factory.isidentifier():
            raise ValueError("expected 'module:factory' or 'file.py:factory'")
        return value

    @field_validator("stages")
    @classmethod
    def _stages_are_not_empty(cls, value: Any) -> Any:
        if value != "auto" and not value:
            raise ValueError("expected 'auto' or at least one call site")
        if value != "auto" and len(set(value)) != len(value):
            raise ValueError("a call site is listed twice")
        return value

    @field_validator("concurrency")
    @classmethod
    def _levels_rise(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)):
            raise ValueError("expected rising numbers, such as [1, 2, 4]")
        return value

    @model_validator(mode="after")
    def _metric_has_what_it_needs(self) -> Workload:
        if self.metric == "cadence_p95" and self.media is None:
            raise ValueError("metric cadence_p95 needs 'media' (frames_per_chunk, fps) to know when a chunk is late")
        if self.metric == "cold_start" and (self.launches or MIN_COLD_LAUNCHES) < MIN_COLD_LAUNCHES:
            raise ValueError(f"metric cold_start needs 'launches' to be {MIN_COLD_LAUNCHES} or more")
        return self

    @model_validator(mode="after")
    def _scenarios_can_be_told_apart(self) -> Workload:
        for name, overrides in self.scenarios.items():
            items = overrides.get(ITEMS_KEY, 1)
            if type(items) is not int or items < 1:
                raise ValueError(f"scenarios.{name}.{ITEMS_KEY}: expected a whole number above 0, not {items!r}")
        if self.sweep is not None:
            if both := set(self.sweep.scenario_names) & set(self.scenarios):
                raise ValueError(f"sweep makes the scenario {min(both)!r}, which 'scenarios' has as well")
            with_value(self.inputs, self.sweep.input, self.sweep.values[0])
        return self

    @model_validator(mode="after")
    def _modules_are_compiled_or_tuned(self) -> Workload:
        if self.compile is not None and self.tuned is not None:
            raise ValueError("compile and tuned exclude each other: an archive has what serves its modules")
        return self

    @model_validator(mode="after")
    def _requests_have_one_process(self) -> Workload:
        if self.concurrency and self.nproc > 1:
            raise ValueError(
                "concurrency needs nproc to be 1: ranks that serve several requests at once would deadlock"
            )
        return self

    @property
    def scenario_names(self) -> list[str]:
        """The scenarios in the order they are measured in, those of the sweep last; the default inputs are none."""
        return [*self.scenarios, *(self.sweep.scenario_names if self.sweep else [])]

    def input_set(self, scenario: str | None) -> InputSet:
        """The inputs of a scenario, with what it overrides; of the workload itself for None."""
        if scenario is None:
            return InputSet(self.inputs, self.items_per_call)
        if scenario in self.scenarios:
            overrides: dict[str, Any] = dict(self.scenarios[scenario])
            items = overrides.pop(ITEMS_KEY, self.items_per_call)
            return InputSet({**self.inputs, **overrides}, items)
        assert self.sweep is not None, scenario
        place = self.sweep.scenario_names.index(scenario)
        inputs = with_value(self.inputs, self.sweep.input, self.sweep.values[place])
        return InputSet(inputs, self.sweep.items_of(place, self.items_per_call))

    @property
    def num_launches(self) -> int:
        """Processes that rung 1 is measured in."""
        return self.launches or (MIN_COLD_LAUNCHES if self.metric == "cold_start" else 1)

    @property
    def fingerprints(self) -> Fingerprints:
        """The three fingerprints, without the commit and versions that only a session knows."""
        return Fingerprints.of(self)


class Fingerprint(Model):
    """A digest and the fields it was made from, so that a difference can be named."""

    digest: str
    fields: dict[str, JsonValue]

    @staticmethod
    def of(fields: dict[str, JsonValue]) -> Fingerprint:
        """Digest a set of fields."""
        return Fingerprint(digest=digest(fields), fields=fields)


_WORK = ("target", "target_args", "call", "inputs", "scenarios", "sweep", "seed", "model", "task")
_CONFIGURATION = ("dtype", "attention_backend", "compile", "tuned", "device", "nproc")
_PROTOCOL = (
    "metric",
    "items_per_call",
    "media",
    "stages",
    "warmup_runs",
    "warmup_limit",
    "measured_runs",
    "require_idle_device",
    "launches",
    "concurrency",
)


class Fingerprints(Model):
    """What was run, how it was configured and how it was measured: only runs of the same work can be compared."""

    work: Fingerprint
    configuration: Fingerprint
    protocol: Fingerprint

    @staticmethod
    def of(workload: Workload, **configuration: JsonValue) -> Fingerprints:
        """Build the fingerprints; `configuration` adds what only the session knows, such as the commit."""
        data = workload.model_dump(mode="json")

        def pick(names: tuple[str, ...]) -> dict[str, JsonValue]:
            return {name: data[name] for name in names}

        return Fingerprints(
            work=Fingerprint.of(pick(_WORK)),
            configuration=Fingerprint.of({**pick(_CONFIGURATION), **configuration}),
            protocol=Fingerprint.of(pick(_PROTOCOL)),
        )


class WorkloadFile(NamedTuple):
    """A workload and the folder that its relative paths start from."""

    workload: Workload
    base_dir: Path


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML, where a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"field {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def load_workload(source: str | Path) -> WorkloadFile:
    """Read a workload file, or a built-in workload by its name.

    Raises:
        InputError: No such file or built-in name, no valid YAML, or a wrong field.
    """
    path = _find(source)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise InputError(f"Workload file {path} is not valid YAML: {reason}") from error
    except OSError as error:
        raise InputError(f"Workload file {path} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise InputError(f"Workload file {path} is nested too deeply.") from None
    return WorkloadFile(parse_workload(data, what=f"Workload file {path}"), path.resolve().parent)


def parse_workload(data: object, *, what: str = "The workload") -> Workload:
    """Check a mapping (as YAML or JSON gives it) against the schema.

    Raises:
        InputError: Names each wrong field, what it accepts, and near names for an unknown one.
    """
    if not isinstance(data, dict):
        there = "it is empty" if data is None else f"not {type(data).__name__}"
        raise InputError(f"{what} must be a mapping of fields such as 'name' and 'target'; {there}.")
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        raise input_error(error, Workload, what) from error


def _find(source: str | Path) -> Path:
    from perfladder.workloads import builtin_names, builtin_path

    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a workload file (YAML) in it.")
    builtin = builtin_path(str(source))
    if builtin is not None:
        return builtin
    raise InputError(
        f"There is no workload file {str(source)!r}, and no built-in workload of that name. "
        + near_names(str(source), builtin_names(), "built-in workloads")
    )
