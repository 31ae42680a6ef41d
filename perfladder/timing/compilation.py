"""What torch.compile did in the parts of a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfladder.models import ResultWarning
from perfladder.timing.results import Compilations

if TYPE_CHECKING:
    from perfladder._torch_private import CompileCounters


def compilations_of(counters: list[CompileCounters]) -> dict[str, Compilations]:
    """What was compiled in each part; nothing at all is an empty table."""
    parts = zip(("first_call", "warmup", "measured"), counters[1:], counters, strict=False)
    found = {name: Compilations(**after.since(before)._asdict()) for name, after, before in parts}
    return found if any(part != Compilations() for part in found.values()) else {}


def compile_warnings(compilations: dict[str, Compilations]) -> list[ResultWarning]:
    """What was compiled that a warm, compiled run should not compile."""
    warnings = []
    measured = compilations.get("measured", Compilations())
    if measured.graphs or measured.recompiles:
        message = (
            f"torch.compile made {measured.graphs} graphs in the measured runs ({measured.recompiles} recompilations); "
            "raise warmup_runs, or find what changes from run to run."
        )
        warnings.append(ResultWarning(code="COMPILED_WHILE_MEASURED", message=message))
    if num := sum(part.limit_hits for part in compilations.values()):
        message = f"{num} functions reached torch.compile's limit of recompilations and run uncompiled from then on."
        warnings.append(ResultWarning(code="RECOMPILE_LIMIT", message=message))
    return warnings
