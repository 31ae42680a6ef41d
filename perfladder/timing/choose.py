"""Which call sites rung 1 observes: those that a run reaches, and not too often."""

from __future__ import annotations

import sys
from collections import Counter

from perfladder.errors import InputError
from perfladder.instrument import Site, any_mark, instrument
from perfladder.models import ResultWarning
from perfladder.sites import resolve_site, stage_sites
from perfladder.target import LoadedTarget
from perfladder.timing.runs import bare_run
from perfladder.timing.timer import Clock, StageTimer

_MAX_CALLS_PER_RUN = 500
"""A site called more often than this in one run is dropped from rung 1: its hooks (about 6 us a call) would show."""


def candidate_sites(loaded: LoadedTarget) -> tuple[list[Site], dict[str, InputError]]:
    """What to look for in a run: sites, and names that are no path on the target but may be marks in user code."""
    stages = loaded.workload.stages
    if stages == "auto":
        # The workload's own call is what is timed end to end: as a stage it would hide what is outside the others.
        sites = [site for site in stage_sites(loaded.obj) if site.path != loaded.workload.call]
        return [*sites, any_mark()], {}
    sites, unresolved = [], {}
    for path in stages:
        try:
            sites.append(resolve_site(loaded.obj, path))
        except InputError as error:
            if "perfladder.marks" not in sys.modules:
                raise
            unresolved[path] = error
    return [*sites, any_mark()] if unresolved else sites, unresolved


def choose_sites(
    loaded: LoadedTarget, candidates: list[Site], unresolved: dict[str, InputError], clock: Clock
) -> tuple[list[Site], list[ResultWarning]]:
    """One observed run tells which sites are reached, and which are called too often to be a stage.

    Raises:
        InputError: A stage is neither a path on the target nor a mark that was met.
    """
    is_auto = loaded.workload.stages == "auto"
    timer = StageTimer(clock, loaded.device)
    with instrument(candidates, timer) as state:
        bare_run(loaded, None, clock)
    calls = timer.take()
    counts = Counter(call.site.path for call in calls)
    warnings = [
        ResultWarning(code="SITE_NOT_OBSERVABLE", message=f"{path}: {reason}")
        for path, reason in state.unobservable.items()
    ]
    marks = dict.fromkeys(call.site for call in calls if call.site.is_mark)
    for path, error in unresolved.items():
        if path not in counts:
            raise InputError(f"{error} No mark of that name was met in a run either.") from error
    wanted = [site for site in candidates if site.path != any_mark().path]
    if is_auto:
        # The user's own word counts: a mark stands before a part of the same name.
        named = {site.path for site in marks}
        wanted = [site for site in _without_parts_of_phases(wanted, counts) if site.path not in named]
    wanted += [site for site in marks if is_auto or site.path in unresolved]
    chosen = []
    for site in wanted:
        count = counts[state.aliases.get(site.path, site.path)]
        if count == 0 and not is_auto:
            message = f"Stage {site.path!r} was not called in a run of the workload."
            warnings.append(ResultWarning(code="STAGE_NEVER_CALLED", message=message))
        elif count > _MAX_CALLS_PER_RUN:
            message = f"{site.path!r} is called {count} times a run and is left out of stage timing; see the regions."
            warnings.append(ResultWarning(code="STAGE_CALLED_TOO_OFTEN", message=message))
        elif count or (site.phase == "decode" and counts[site.path.removesuffix("decode") + "prefill"]):
            # A model that made one token in this run may make more of them with other inputs.
            chosen.append(site)
    return chosen, warnings


def _without_parts_of_phases(sites: list[Site], counts: Counter[str]) -> list[Site]:
    """Where a model's prefill and decode were met, these are its stages, not the model as a whole or its parts."""
    for prefill in [site for site in sites if site.phase == "prefill" and counts[site.path]]:
        path = prefill.path.rpartition(".")[0]
        kept = [site for site in sites if site.phase or site.method == "generate" or not _lies_in(site.path, path)]
        model = [site for site in sites if site.path == path and site.is_module and not site.phase]
        in_phases = sum(counts[site.path] for site in sites if site.phase and site.owner is prefill.owner)
        sites = kept + [site for site in model if counts[site.path] > in_phases]
    return sites


def _lies_in(path: str, outer: str) -> bool:
    return outer == "" or path == outer or path.startswith(f"{outer}.")
