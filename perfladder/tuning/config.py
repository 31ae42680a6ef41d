"""`config`: the settings of the tuning engine that hold for a whole process, checked when they are set."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from perfladder.errors import InputError
from perfladder.files import cache_folder
from perfladder.models import Model, input_error
from perfladder.text import near_names

_BOOLEANS: Final = {"1": True, "true": True, "0": False, "false": False}


def default_cache_dir(variables: Mapping[str, str]) -> Path:
    """Where builds are kept if nobody says: in the user's cache folder, or a temporary one without a home."""
    base = cache_folder(variables) or Path(tempfile.gettempdir()) / f"perfladder-{os.geteuid()}"
    return base.absolute() / "tuning"


def _full_path(value: object) -> object:
    """A path with `~` expanded, and absolute: the process may change its folder later."""
    if not isinstance(value, (str, os.PathLike)):
        return value
    if not os.fspath(value):
        raise ValueError("a path is needed, and this one is empty")
    try:
        # Text, since pydantic accepts no other kind of path when it reads JSON.
        return str(Path(value).expanduser().absolute())
    except RuntimeError:
        raise ValueError("'~' stands for a home folder that this machine does not know; write the whole path") from None


def _device_name(value: object) -> object:
    """A `torch.device` as text, known by its name so that torch stays out of here."""
    kind = type(value)
    return str(value) if (kind.__module__, kind.__name__) == ("torch", "device") else value


FullPath = Annotated[Path, BeforeValidator(_full_path)]
DeviceName = Annotated[str, BeforeValidator(_device_name), Field(strict=True, pattern=r"^[a-z]+(:\d+)?$")]
Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]


class TuningSettings(Model):
    """The settings as one call sees them from its start to its end."""

    cache_dir: FullPath = Field(
        default_factory=lambda: default_cache_dir(os.environ),
        description="Builds, their logs and the report; a private folder of the user.",
    )
    min_num_samples: Count = Field(default=1, description="Recorded samples of a graph below which tuning warns.")
    max_num_samples_stored: Count = Field(
        default=4, description="Samples kept for a graph: each is one more that outputs are compared on."
    )
    max_num_graphs: Count = Field(default=32, description="Graphs of a module; more of them are an error.")
    device_after_tuning: DeviceName = Field(
        default="keep",
        description="Where the original goes once no chosen backend needs its weights: `keep` leaves it, `meta` frees "
        "them, and `cpu`, `cuda:1` and so on name a device.",
    )
    strict_mode: Flag = Field(default=True, description="Other values of scalar inputs make another graph.")
    unseen_graph: Literal["eager", "error"] = Field(
        default="eager", description="What a tuned module does with inputs of a kind that was not recorded."
    )
    tuning_data_output_path: FullPath | None = Field(
        default=None, description="The tuning report's file; None: `tuning_report.json` in `cache_dir`."
    )
    enable_transformers_integration: Flag = Field(
        default=True, description="Look into outputs and caches of transformers; else they are objects like any other."
    )
    enable_diffusers_integration: Flag = Field(
        default=True, description="Look into outputs of diffusers; else they are objects like any other."
    )
    nvtx: Flag = Field(default=False, description="Ranges for Nsight Systems around what tuning does.")
    hardware_metrics: Flag = Field(default=False, description="Sample utilization, memory and power while tuning.")
    isolate_builds: Flag = Field(
        default=True,
        description="Make the first build of a candidate in a process of its own, which may crash or hang.",
    )
    build_timeout_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = Field(
        default=1800.0, description="A build that takes longer is ended, and its candidate has failed."
    )
    build_max_memory_bytes: Count | None = Field(
        default=None, description="Memory that a build in a process of its own may take; None: no limit."
    )

    @property
    def report_path(self) -> Path:
        """Where the tuning report is written."""
        return self.tuning_data_output_path or self.cache_dir / "tuning_report.json"


class TuningConfig(TuningSettings):
    """The settings while they can be changed: `config.strict_mode = False`.

    A value counts for the calls that start after it was set; `snapshot` is what such a call reads.

    Raises:
        InputError: When a field is set: there is no such field, or it does not accept the value.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    _at_start: TuningSettings

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> TuningConfig:
        """Defaults, and what the environment variables say.

        Raises:
            InputError: A variable has a wrong value.
        """
        return cls(**{"cache_dir": default_cache_dir(variables), **read_environment(variables)})

    def model_post_init(self, _: Any, /) -> None:
        """Keep what the object was made from, for `reset_to_defaults`."""
        self._at_start = self.snapshot()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in TuningSettings.model_fields and not name.startswith("_"):
            hint = near_names(name, TuningSettings.model_fields, "settings", limit=40)
            raise InputError(f"config.{name}: unknown setting. {hint}")
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise input_error(error, TuningSettings, "config") from None

    def snapshot(self) -> TuningSettings:
        """A copy that does not change any more."""
        return TuningSettings.model_construct(**{name: getattr(self, name) for name in TuningSettings.model_fields})

    def reset_to_defaults(self) -> None:
        """Set every field as it was at the start: its default, or what the environment variables said then."""
        for name in TuningSettings.model_fields:
            setattr(self, name, getattr(self._at_start, name))


def read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """The settings that environment variables give; an empty variable is one that is not set.

    Args:
        variables: The process's environment variables.

    Raises:
        InputError: A variable has a wrong value.
    """
    readers: dict[str, tuple[str, Callable[[str], object]]] = {
        "PERFLADDER_CACHE_DIR": ("cache_dir", _read_path),
        "PERFLADDER_NVTX": ("nvtx", _boolean),
        "PERFLADDER_HARDWARE_METRICS": ("hardware_metrics", _boolean),
        "PERFLADDER_TUNING_REPORT": ("tuning_data_output_path", _read_path),
    }
    found = {}
    for variable, (field, read) in readers.items():
        if text := variables.get(variable):
            try:
                found[field] = read(text)
            except ValueError as error:
                raise InputError(f"Environment variable {variable}: {error} (got {text!r}).") from None
    return found


def _read_path(text: str) -> Path:
    return Path(str(_full_path(text)))


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError("expected 1, 0, true or false")
    return _BOOLEANS[text.lower()]


config = TuningConfig.of(os.environ)
"""The settings of this process."""
