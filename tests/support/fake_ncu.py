"""A stand-in for the executable `ncu`: tells its version, and otherwise does what a plan beside it says.

The plan is `plan.json` in its folder: `log` and `printed` (lines), `report` (a file to copy to where --export says),
`exit_code`, `runs_program` (start the program that would be profiled), `hangs`, `signal`. What it was called with is
written to `called.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

VERSION_LINES = ["NVIDIA (R) Nsight Compute Command Line Profiler", "Version 2025.3.1.0 (build 1) (public-release)"]

# Messages of ncu 2022 to 2025, as they were seen.
NOTHING = "==WARNING== No kernels were profiled."
PERMISSION = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
IN_USE = (
    "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is "
    "concurrently collecting profiling data."
)
UNSUPPORTED = "==ERROR== Profiling is not supported on device 0. To find out supported GPUs refer --list-chips option."
NO_LIBRARY = "==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is"


def install(folder: Path, **plan: object) -> Path:
    """Put the executable and its plan into a folder."""
    folder.mkdir(exist_ok=True)
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text()}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "plan.json").write_text(json.dumps(plan))
    return path


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print("\n".join(VERSION_LINES))
        return 0
    here = Path(__file__).parent
    plan = json.loads((here / "plan.json").read_text())
    (here / "called.json").write_text(json.dumps(arguments))
    print("\n".join(plan.get("printed", [])), flush=True)
    if plan.get("log"):
        Path(option(arguments, "--log-file")).write_text("\n".join(plan["log"]) + "\n")
    if plan.get("runs_program"):
        program = arguments[arguments.index("--log-file") + 2 :]
        code = subprocess.run(program, check=False).returncode
        with open(option(arguments, "--log-file"), "a") as log:
            log.write(f"==ERROR== The application returned an error code ({code}).\n" if code else "")
    if plan.get("report"):
        shutil.copy(plan["report"], option(arguments, "--export"))
    if plan.get("hangs"):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    if plan.get("signal"):
        os.kill(os.getpid(), plan["signal"])
    return int(plan.get("exit_code", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
