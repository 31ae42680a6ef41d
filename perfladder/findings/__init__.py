"""What the evidence of the rungs says: claims that a reader can check, and the table that decides what comes next."""

from perfladder.findings.collect import collect_findings
from perfladder.findings.finding import Evidence, Finding, Kind
from perfladder.findings.policy import POLICY, PolicyRow, rungs_to_skip, smallest_next_experiment

__all__ = [
    "POLICY",
    "Evidence",
    "Finding",
    "Kind",
    "PolicyRow",
    "collect_findings",
    "rungs_to_skip",
    "smallest_next_experiment",
]
