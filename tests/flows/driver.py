"""Runs the flow in a process of its own, as the command line does: `driver.py CONFIG_JSON [HOOKS_JSON]`.

Prints one JSON line at the end: the outcome, or the error. Hooks: `on` = {text: file} makes the file when a progress
line holds the text; `fill` = {text: file} fills the disk with it; `fake_server` = an executable that stands for the
interpreter with Prefect, and `limit_s` how long it is waited for; `direct` calls the flow itself; `compare` runs the
flow that compares runs, `tune` the one that tunes with proof.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfladder.errors import PerfladderError
from perfladder.flows import run
from perfladder.flows.config import CompareRunsConfig, ProfilePipelineConfig, TunePipelineConfig
from perfladder.flows.prefect_server import PrefectServer


def fill_disk(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * (64 << 10))


def main(config: dict[str, Any], hooks: dict[str, Any]) -> dict[str, Any]:
    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        for text, file in hooks.get("on", {}).items():
            if text in line:
                Path(file).touch()
        for text, file in hooks.get("fill", {}).items():
            if text in line:
                fill_disk(Path(file))

    if fake := hooks.get("fake_server"):
        run.find_server = lambda runs_dir, variables: PrefectServer(
            runs_dir, variables=variables, python=fake, limit_s=hooks["limit_s"]
        )
    try:
        if hooks.get("tune"):
            tuning = TunePipelineConfig.model_validate(config)
            return run.run_tune_pipeline(tuning, tell, lambda now: tell(now.label)).model_dump(mode="json")
        if hooks.get("compare"):
            return run.run_compare_runs(CompareRunsConfig.model_validate(config)).model_dump(mode="json")
        parsed = ProfilePipelineConfig.model_validate(config)
        if hooks.get("direct"):
            from perfladder.flows.profile_pipeline import profile_pipeline

            outcome = profile_pipeline(parsed)
        else:
            outcome = run.run_profile_pipeline(parsed, tell)
    except PerfladderError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    return outcome.model_dump(mode="json")


if __name__ == "__main__":
    hooks = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    answer = main(json.loads(sys.argv[1]), hooks)
    answer["prefect_url_after"] = os.environ.get("PREFECT_API_URL")
    print(json.dumps(answer), flush=True)
