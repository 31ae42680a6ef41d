"""`jit_config`: the settings of just-in-time tuning, which hold for a whole process, checked when they are set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from perfladder.errors import InputError
from perfladder.models import Model, input_error
from perfladder.text import near_names
from perfladder.tuning.config import Count, DeviceName, Flag, FullPath, default_cache_dir

Mode = Literal["tune_eager", "tune_deferred", "inspect"]
Level = Annotated[int, Field(strict=True, ge=0)]

_CACHE_DIR: Final = "PERFLADDER_JIT_CACHE_DIR"


def _strategy(value: object) -> object:
    if value is None:
        return None
    from perfladder.tuning.strategies import TuneStrategy

    if not isinstance(value, TuneStrategy):
        raise ValueError("expected a strategy, such as MaxThroughputStrategy(), or None")
    return value


def _class_or_name(value: object) -> object:
    if not isinstance(value, (type, str)) or value == "":
        raise ValueError("expected classes of modules, or names such as 'UNet.encoder'")
    return value


Strategy = Annotated[Any, BeforeValidator(_strategy)]
ClassOrName = Annotated[Any, BeforeValidator(_class_or_name)]


class JitSettings(Model):
    """The settings as one call sees them."""

    mode: Mode = Field(
        default="tune_eager",
        description="`tune_eager`: tune as soon as enough calls are recorded; `tune_deferred`: only after "
        "`tune_deferred()`; `inspect`: tune nothing, and time the modules.",
    )
    dry_run: Flag = Field(default=False, description="Record, tell what would be tried, and build nothing.")
    device: DeviceName | None = Field(default=None, description="Leave modules on other devices alone; None: none.")
    min_samples: Count = Field(default=1, description="Recorded calls of a graph before it is tuned.")
    batch_axis_required: Flag = Field(
        default=False,
        description="With `min_samples` above 1: tune a graph only once its calls have differed in a size.",
    )
    max_depth_level: Level = Field(
        default=1, description="How far below the topmost module others are tried; the topmost one has level 0."
    )
    min_parameters: Level = Field(
        default=0, description="Modules with fewer parameters are left alone; those without any always are."
    )
    max_num_graphs: Count = Field(default=8, description="Forms of call of a module that are tuned; others run eager.")
    detect_graph_breaks: Flag = Field(
        default=False, description="Take a module that a compiler breaks for one that cannot be tuned: try those in it."
    )
    skip_modules: list[ClassOrName] = Field(
        default=[],
        description="Classes, class names or names of modules that are left alone, with all that is in them.",
    )
    patch_exclude: tuple[str, ...] = Field(
        default=(), description="Python modules, as `mypackage.layers`, whose classes are left alone in the same way."
    )
    cache_dir: FullPath = Field(
        default_factory=lambda: default_jit_cache_dir(os.environ),
        description="What was found, builds, and Inductor's cache; a private folder of the user.",
    )
    strategy: Strategy = Field(
        default=None, description="How graphs are tuned; None: the highest throughput of what is built in the process."
    )


class JitConfig(JitSettings):
    """The settings while they can be changed: `jit_config.min_samples = 2`.

    A value counts from the next call of a module on; `snapshot` is what such a call reads.

    Raises:
        InputError: When a field is set: there is no such field, or it does not accept the value.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    _at_start: JitSettings

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> JitConfig:
        """Defaults, and what the environment variables say."""
        return cls(cache_dir=default_jit_cache_dir(variables))

    def model_post_init(self, _: Any, /) -> None:
        """Keep what the object was made from, for `reset_to_defaults`."""
        self._at_start = self.snapshot()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in JitSettings.model_fields and not name.startswith("_"):
            hint = near_names(name, JitSettings.model_fields, "settings", limit=40)
            raise InputError(f"jit_config.{name}: unknown setting. {hint}")
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise input_error(error, JitSettings, "jit_config") from None

    def snapshot(self) -> JitSettings:
        """A copy that does not change any more."""
        values = {name: getattr(self, name) for name in JitSettings.model_fields}
        return JitSettings.model_construct(**values | {"skip_modules": list(self.skip_modules)})

    def reset_to_defaults(self) -> None:
        """Set every field as it was at the start: its default, or what the environment variables said then."""
        for name in JitSettings.model_fields:
            value = getattr(self._at_start, name)
            setattr(self, name, list(value) if isinstance(value, list) else value)


def default_jit_cache_dir(variables: Mapping[str, str]) -> Path:
    """Where results are kept if nobody says: beside those of other tunings.

    Args:
        variables: The process's environment variables.
    """
    if text := variables.get(_CACHE_DIR):
        return Path(text).expanduser().absolute()
    return default_cache_dir(variables).parent / "jit"


jit_config = JitConfig.of(os.environ)
"""The settings of this process."""
