"""What Prefect and MLflow add to a run: against servers that are up, and with a server that starts with the run.

    python tests/benchmarks/bench_servers.py --repeats 3

Every repeat runs each way once, in turns: plainly, with servers that are up, and by itself; with one rung and with all.
Prints the medians of the differences to the plain run of the same repeat, and what one rung adds: by the clock, and in
processor time of the run with all below it, for a machine on which others work too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNTILS = ("stages", "kernels")
KINDS = ("wall", "processor")


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="streaming")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = Path(folder, "servers")
        up_variables = {**os.environ, "PERFLADDER_SERVERS_DIR": str(servers)}
        alone_variables = {**os.environ, "PERFLADDER_SERVERS_DIR": str(Path(folder, "none"))}
        started_at = time.monotonic()
        subprocess.run(_command("up", "--json"), env=up_variables, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, list[float]] = {"up": [time.monotonic() - started_at]}
        try:
            for _ in range(options.repeats):
                for until in UNTILS:
                    run = ["run", options.workload, "--until", until, "--json"]
                    plain = _time([*run, "--plain", "--out", f"{folder}/plain"], alone_variables)
                    for name, variables in (("running", up_variables), ("by itself", alone_variables)):
                        times = _time([*run, "--out", f"{folder}/{name}"], variables)
                        for kind, with_servers_s, without_s in zip(KINDS, times, plain, strict=True):
                            added = found.setdefault(f"{name}, until {until}, {kind}", [])
                            added.append(with_servers_s - without_s)
                    for kind, plain_s in zip(KINDS, plain, strict=True):
                        found.setdefault(f"plain, until {until}, {kind}", []).append(plain_s)
        finally:
            subprocess.run(_command("down"), env=up_variables, check=True, stdout=subprocess.DEVNULL)
        num_rungs = _num_rungs(Path(folder, "running")) - 1
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name in ("running", "by itself"):
        for kind in KINDS:
            added_s = medians[f"{name}, until kernels, {kind}"] - medians[f"{name}, until stages, {kind}"]
            medians[f"{name}, each further rung, {kind}"] = added_s / num_rungs
    print(json.dumps({"medians_s": medians, "all_s": found, "load": os.getloadavg()}, indent=1))


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perfladder.cli", *arguments]


def _time(arguments: list[str], variables: dict[str, str]) -> tuple[float, float]:
    started_at, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        _command(*arguments), env=variables, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - started_at, processor_s


def _num_rungs(runs_dir: Path) -> int:
    return max(len(json.loads(path.read_text())["rungs"]) for path in runs_dir.glob("*/*/run.json"))


if __name__ == "__main__":
    main()
