"""Climb the ladder on the planted pipelines and keep small copies of the results, which tests of findings read.

    python tests/benchmarks/record_findings.py FOLDER [--only NAME ...]

Needs a CUDA device. What no finding rests on (events, trees, kernel lists beyond the first ten) is left out.
"""

import argparse
import json
import tempfile
from pathlib import Path

from perfladder.ladder import climb
from perfladder.workload import parse_workload

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "tests" / "support" / "planted.py"
NAMES = ("waiting", "ahead", "chain", "glue", "copies", "products", "wide")
LONG_LISTS = (
    "kernels",
    "ranking",
    "operator_ranking",
    "roofline",
    "by_kernel",
    "by_module",
    "by_operator",
    "by_function",
)
DROPPED = ("region_tree", "key_averages", "run_start_ns", "call_samples_ms", "snapshot_before", "snapshot_after")


def slim(value):
    """A result without what no finding reads."""
    if isinstance(value, dict):
        return {
            key: slim(inner[:10] if key in LONG_LISTS and isinstance(inner, list) else inner)
            for key, inner in value.items()
            if key not in DROPPED
        }
    return [slim(inner) for inner in value] if isinstance(value, list) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=NAMES)
    options = parser.parse_args()
    for name in options.only:
        workload = parse_workload({"name": name, "target": f"{PLANTED}:{name}", "device": "cuda"})
        with tempfile.TemporaryDirectory() as runs:
            outcome = climb(workload, runs_dir=runs, tell=print)
            run = Path(outcome.run_dir)
            target = options.folder / name
            target.mkdir(parents=True, exist_ok=True)
            for path in (run / "environment.json", *run.glob("*/*.json")):
                if path.name.endswith(".trace.json") or path.name == "manifest.json":
                    continue
                text = path.read_text().replace(str(ROOT), "")
                (target / path.name).write_text(json.dumps(slim(json.loads(text)), separators=(",", ":")))
            print(name, outcome.status, [(finding.rung, finding.kind) for finding in outcome.findings], flush=True)
            for finding in outcome.findings:
                print("   ", finding.claim, flush=True)


if __name__ == "__main__":
    main()
