"""The base of the rows that leave this folder: frozen models, a misspelt field is an error, units in the names."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Row(BaseModel):
    """One row of a result. Times are microseconds (`_us`), fractions run from 0 to 1; None means unknown, never 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)
