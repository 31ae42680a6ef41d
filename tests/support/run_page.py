"""Runs the blocks of one page in the current folder, in order: JSON steps on stdin, and the first failure ends it.

All Python blocks of a page share one process and its names, as a reader's session does; commands are run by bash.
"""

from __future__ import annotations

import json
import linecache
import resource
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path


def run(step: dict[str, str], names: dict[str, object]) -> str | None:
    """Do one step; what went wrong, or None."""
    text = step["text"]
    if step["kind"] == "file":
        Path(step["name"]).write_text(text)
    elif step["kind"] == "python":
        linecache.cache[step["where"]] = (len(text), None, text.splitlines(keepends=True), step["where"])
        try:
            exec(compile(text, step["where"], "exec"), names)
        except BaseException:
            return traceback.format_exc()
    else:
        ended = subprocess.run(["bash", "-euo", "pipefail", "-c", text], stdin=subprocess.DEVNULL, check=False)
        if ended.returncode != int(step["exits"]):
            return f"$ {text}\nended with exit code {ended.returncode}, and not {step['exits']}"
    return None


def cpu_s() -> float:
    """Processor time of this process and of those that have ended below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Run all steps; 1 where one failed."""
    # The page is the main module, as a script is: what it defines is found there, and hides nothing of this one.
    page = sys.modules["__main__"] = types.ModuleType("__main__")
    for step in json.load(sys.stdin):
        start, start_cpu_s = time.monotonic(), cpu_s()
        print(f"=== {step['where']} {step['kind']}", flush=True)
        if problem := run(step, vars(page)):
            print(f"{step['where']}: {problem}", file=sys.stderr, flush=True)
            return 1
        print(f"=== {time.monotonic() - start:.1f} s, {cpu_s() - start_cpu_s:.1f} s of them at work", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
