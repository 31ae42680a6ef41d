"""What a measuring function tells while it works, so that who waits sees how far it is."""

from __future__ import annotations

from pydantic import Field

from perfladder.models import Model


class Progress(Model):
    """One moment of a long measurement."""

    label: str = Field(description="What is done now.")
    num_done: int = 0
    num_total: int = Field(default=0, description="Of what is counted; 0: nothing is.")
    remaining_s: float | None = Field(default=None, description="Estimate; None: there is none.")
    limit_s: float | None = Field(
        default=None, description="How long it may be silent from now on; None: as long as the whole call may."
    )
