"""What `perfladder tune` is asked for, and how a command line says it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from perfladder.errors import InputError
from perfladder.models import Model, input_error
from perfladder.stats import MIN_PAIRS

Metric = Literal["cosine", "psnr", "ssim"]
"""Those of `QualityGate`, which brings torch."""
StrategyName = Literal["first-wins", "max-throughput", "min-latency", "latency-budget", "one-backend"]


class BackendChoice(Model):
    """A backend by its name, with those of its options that are not to be their defaults."""

    name: str = Field(min_length=1, description="As `perfladder tune --backend` takes it.")
    options: dict[str, JsonValue] = Field(default={}, description="Those that are not to be their defaults.")

    @classmethod
    def parse(cls, text: str) -> BackendChoice:
        """Read `NAME` or `NAME:key=value,key=value`; values are YAML.

        Raises:
            InputError: It has another form.
        """
        name, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for part in _split(rest):
            key, separator, value = part.partition("=")
            if not separator or not key.strip():
                raise InputError(f"--backend {text!r}: expected NAME or NAME:key=value,key=value; {part!r} is neither.")
            try:
                options[key.strip()] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise InputError(f"--backend {text!r}: the value of {key.strip()} is not valid YAML.") from error
        if not name.strip():
            raise InputError(f"--backend {text!r}: the name is missing, as in inductor_jit:dynamic=true.")
        return cls(name=name.strip(), options=options)


class GateChoice(Model):
    """The least likeness of the whole output to that of the plain modules."""

    metric: Metric = Field(description="How likeness is measured.")
    minimum: float = Field(description="The least value that is accepted.")

    @classmethod
    def parse(cls, text: str) -> GateChoice:
        """Read `cosine>=0.99`, `psnr>=30` or `ssim>=0.95`.

        Raises:
            InputError: It has another form.
        """
        metric, separator, number = (part.strip() for part in text.partition(">="))
        try:
            minimum = float(number)
        except ValueError:
            minimum = math.nan
        if metric not in get_args(Metric) or not separator or not math.isfinite(minimum):
            raise InputError(
                f"--quality {text!r}: expected one of {', '.join(get_args(Metric))}, and its least value, as in "
                "cosine>=0.99."
            )
        return cls(metric=metric, minimum=minimum)

    def __str__(self) -> str:
        return f"{self.metric} >= {self.minimum:g}"


class TuneRequest(Model):
    """Which modules to tune, how, and what has to be shown before the result is kept."""

    modules: list[str] | None = Field(default=None, min_length=1, description="Paths; None: by their share of time.")
    min_share: float = Field(default=0.02, ge=0, le=1, description="Least part of the whole time of a module.")
    limit: int | None = Field(default=None, gt=0, description="At most so many modules, the slowest first.")
    strategy: StrategyName = Field(default="first-wins", description="How a backend is chosen for each form of call.")
    latency_budget_ms: float | None = Field(default=None, gt=0, description="Of a module's call.")
    backends: list[BackendChoice] = Field(default=[], description="In order; none: the strategy's defaults.")
    quality: GateChoice | None = Field(default=None, description="Of the whole output; None: tolerances by dtype.")
    keep: Literal["faster", "right"] | float = Field(
        default="faster",
        description="faster: the speedup's interval lies above 1; a number: above that; right: at any speed.",
    )
    pairs: int = Field(default=20, ge=MIN_PAIRS, description="Runs of each side, tuned and plain in turns.")
    save: str | None = Field(default=None, description="Archive for what is kept.")
    isolate_builds: bool = Field(default=True, description="First builds in processes of their own.")
    cache_dir: str | None = Field(default=None, description="None: as the configuration has it.")
    clear_cache: bool = Field(default=False, description="Forget what earlier tunings found.")
    dry_run: bool = Field(default=False, description="Tell what would be tried, and build nothing.")

    @field_validator("keep")
    @classmethod
    def _check_keep(cls, value: str | float) -> str | float:
        if isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError("expected faster, right, or a least speedup such as 1.05")
        return value

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        is_budget = self.strategy == "latency-budget"
        if is_budget and self.latency_budget_ms is None:
            raise ValueError("strategy latency-budget needs latency_budget_ms")
        if not is_budget and self.latency_budget_ms is not None:
            raise ValueError(f"latency_budget_ms is for the strategy latency-budget, not for {self.strategy}")
        if self.strategy == "one-backend" and len(self.backends) != 1:
            raise ValueError(f"strategy one-backend needs one backend, and {len(self.backends)} are given")
        if self.save is not None and self.dry_run:
            raise ValueError("save and dry_run exclude each other: a dry run makes nothing that could be saved")
        return self


def tune_request(
    *, backends: list[str], quality: str | None, keep: str, save: Path | None, cache_dir: Path | None, **fields: Any
) -> TuneRequest:
    """The request that a command line's options make.

    Raises:
        InputError: An option is wrong, or two do not go together.
    """
    if save is not None and not save.absolute().parent.is_dir():
        raise InputError(f"--save {save}: there is no folder {save.absolute().parent}; make it first.")
    if save is not None and save.suffix not in ("", ".ait"):
        raise InputError(f"--save {save}: an archive ends in .ait, not in {save.suffix}.")
    if save is not None and save.is_dir():
        raise InputError(f"--save {save}: that is a folder; give a file's name, such as {save}/tuned.ait.")
    try:
        return TuneRequest(
            backends=[BackendChoice.parse(text) for text in backends],
            quality=GateChoice.parse(quality) if quality is not None else None,
            keep=_parse_keep(keep),
            save=str(save.absolute()) if save else None,
            cache_dir=str(cache_dir.expanduser().absolute()) if cache_dir else None,
            **fields,
        )
    except ValidationError as error:
        raise input_error(error, TuneRequest, "What is asked of tune") from None


def _split(text: str) -> list[str]:
    """Parts between commas, but for those inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if text else []


def _parse_keep(text: str) -> Any:
    if text in ("faster", "right"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--keep {text!r}: expected faster, right, or a least speedup such as 1.05.") from None
