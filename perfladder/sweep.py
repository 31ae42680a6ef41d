"""A sweep: one input of a workload at several values, each of them a scenario of its own."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from perfladder.models import Model


class Sweep(Model):
    """One input at several values, each of them a scenario of its own."""

    input: str = Field(
        min_length=1, description="An input, or a dotted path into one, such as latents.$tensor.0 for a batch size."
    )
    values: list[JsonValue] = Field(min_length=2, description="In the order in which they are measured.")
    items: Literal["value"] | list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None, description="Items in one call: the value itself, or one number for each value."
    )
    min_gain: float = Field(default=0.1, gt=0, description="Relative gain in throughput that is worth a larger value.")

    @model_validator(mode="after")
    def _each_value_has_its_items(self) -> Sweep:
        counts = self.values if self.items == "value" else self.items
        if self.items == "value" and not all(type(value) is int and value > 0 for value in self.values):
            raise ValueError("items: 'value' needs values that are whole numbers above 0")
        if counts is not None and len(counts) != len(self.values):
            raise ValueError(f"items has {len(counts)} numbers for {len(self.values)} values")
        if len(set(self.scenario_names)) != len(self.values):
            raise ValueError("a value is listed twice")
        return self

    @property
    def scenario_names(self) -> list[str]:
        """One name for each value: `batch 8`; a value that is no plain word or number goes by its place, `#2`."""
        return [f"{self.input} {plain_value(value) or f'#{place}'}" for place, value in enumerate(self.values, 1)]

    def items_of(self, place: int, default: int) -> int:
        """Items in one call with the value at `place`, counted from 0."""
        counts: Any = self.values if self.items == "value" else self.items
        return default if counts is None else int(counts[place])


def with_value(inputs: dict[str, JsonValue], path: str, value: JsonValue) -> dict[str, JsonValue]:
    """A copy of the inputs with one value replaced; a whole input may be new, a path into one must lead somewhere."""
    changed: dict[str, Any] = copy.deepcopy(inputs)
    *heads, last = path.split(".")
    owner: Any = changed
    for head in heads:
        owner = owner[_key_in(owner, head, path)]
    owner[last if owner is changed else _key_in(owner, last, path)] = value
    return changed


def _key_in(owner: Any, part: str, path: str) -> str | int:
    """The key or index that one part of a dotted path stands for.

    Raises:
        ValueError: There is nothing of that name, which a model's check turns into a message.
    """
    if isinstance(owner, dict) and part in owner:
        return part
    if isinstance(owner, list) and part.isdecimal() and int(part) < len(owner):
        return int(part)
    raise ValueError(f"sweep.input: {path!r} leads nowhere in 'inputs': there is no {part!r}")


def plain_value(value: JsonValue) -> str | None:
    """A plain word or number as a part of a name; None for what is none."""
    is_plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and value.isprintable() and value)
    return str(value) if is_plain and len(str(value)) <= 40 else None
