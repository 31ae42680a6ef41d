"""Where Nsight Compute and NVIDIA's reader of its reports are on this machine, and which versions."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from perfladder.nsight.report import PACKAGE

_VERSION_LIMIT_S: Final = 20.0
_INSTALLED: Final = (Path("/opt/nvidia/nsight-compute"), Path("/usr/local/cuda"), Path("/usr/local"))


class NcuTool(NamedTuple):
    """The command line of Nsight Compute."""

    path: str
    version: str | None


class Reader(NamedTuple):
    """NVIDIA's package that reads reports; `folder` is None where it is installed as a package."""

    folder: Path | None


def find_ncu() -> NcuTool | None:
    """Look on the PATH, then where installers put it; None without one."""
    path = shutil.which("ncu") or next((str(path) for path in _installed("ncu")), None)
    return None if path is None else NcuTool(path, _version_of(path))


def find_reader(ncu: str | None) -> Reader | None:
    """Look for the installed package, then for the one that Nsight Compute brings along; None without either."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return Reader(None)
    places = [] if ncu is None else [Path(ncu).resolve().parent / "extras" / "python"]
    places += [path.parent for path in _installed(f"extras/python/{PACKAGE}.py")]
    found = next((place for place in places if (place / f"{PACKAGE}.py").is_file()), None)
    return None if found is None else Reader(found)


def _installed(name: str) -> Iterator[Path]:
    """Files of that name in the folders of Nsight Compute, the newest version first."""
    for root in _INSTALLED:
        patterns = (f"*/{name}",) if root.name == "nsight-compute" else (f"nsight-compute*/{name}", f"cuda*/bin/{name}")
        found = [path for pattern in patterns for path in root.glob(pattern) if path.is_file()]
        yield from sorted(found, reverse=True)


def _version_of(path: str) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("Version")]
    return lines[0].removeprefix("Version").strip() if lines else None
