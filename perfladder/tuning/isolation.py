"""A first build in a process of its own, so that a crash, a hang or a lack of memory costs that candidate only."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.child import ChildLimits, ask_child
from perfladder.tuning.build_log import BuildLog

if TYPE_CHECKING:
    from perfladder.backend.base import Backend, BuildRequest


@dataclass(frozen=True)
class TrialLimits:
    """When a first build is ended.

    Attributes:
        timeout_s: From its start.
        max_memory_bytes: Of its processes together; None: what the machine has.
        is_wanted: Without it the first build is made in this process, which may take it down.
        cache_dir: For what compilers keep.
    """

    timeout_s: float
    max_memory_bytes: int | None = None
    is_wanted: bool = True
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Trial:
    """How a first build ended.

    Attributes:
        error: Why it failed; None: it did not.
        duration_s: All of it, imports included.
        peak_host_rss_bytes: Of its processes together, as far as was seen.
    """

    error: str | None
    duration_s: float
    peak_host_rss_bytes: int | None = None


def try_in_child(backend: Backend, request: BuildRequest, limits: TrialLimits) -> Trial:
    """Build, and run what was built, in a fresh process.

    The module and its samples go there through a pipe, pickled for that process alone; no file is written. A module
    that cannot be sent this way is an error: such a backend then does not run here at all. All that the process prints
    goes into the log of the build.
    """
    if not limits.is_wanted:
        return Trial(None, 0.0)
    start = time.monotonic()
    senders: list[_Sender] = []
    log = BuildLog(backend, request, in_child=True)

    def send(process: subprocess.Popen[bytes]) -> threading.Thread:
        senders.append(_Sender(process, backend, request, limits.cache_dir))
        return senders[0]

    with tempfile.TemporaryFile() as output:
        found = ask_child(
            lambda answer_fd: ["-P", "-X", "faulthandler", "-m", "perfladder.tuning.trial", str(answer_fd)],
            ChildLimits(limits.timeout_s, limits.max_memory_bytes, "config.build_timeout_s"),
            output,
            send=send,
        )
        error = senders[0].error or found.error
        if error is None:
            error = json.loads(found.answer)["error"]
        log.write(output, "built, and run on all samples" if error is None else f"failed: {error}")
    return Trial(error, round(time.monotonic() - start, 3), found.peak_host_rss_bytes)


class _Sender(threading.Thread):
    """Writes the work into the child's pipe, which may take no more at any time."""

    def __init__(
        self, process: subprocess.Popen[bytes], backend: Backend, request: BuildRequest, cache_dir: Path | None
    ) -> None:
        super().__init__(name="perfladder-trial", daemon=True)
        self._process, self._work, self._cache_dir = process, (backend, request), cache_dir
        self.error: str | None = None

    def run(self) -> None:
        """Pickle into the pipe; classes of scripts and notebooks go by value."""
        import cloudpickle  # type: ignore[import-untyped]

        assert self._process.stdin is not None
        backend, request = self._work
        work = {
            "backend": backend,
            "module": request.module,
            "graph": request.graph,
            "samples": request.samples,
            "device": str(request.device),
            "folder": str(request.folder),
            "shared_folder": request.shared_folder,
            "cache_dir": self._cache_dir,
        }
        try:
            self._process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            with _by_value([*(type(part) for part in request.module.modules()), *backend.classes]):
                cloudpickle.dump(work, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the child has ended, and the other side tells why
        except Exception as error:
            self.error = (
                f"it cannot be tried in a process of its own: the module cannot be sent there ({error}). "
                "Set config.isolate_builds = False to build it in this process, which a crash or a hang would end."
            )
            self._process.kill()
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


@contextlib.contextmanager
def _by_value(kinds: Iterable[type]) -> Iterator[None]:
    """Let classes of modules that another process cannot import travel with their code, as those of scripts do."""
    import cloudpickle

    names = {kind.__module__ for kind in kinds} - {"__main__", "builtins"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Whether a fresh process finds the package of a module, which this one may have loaded from elsewhere."""
    package = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(package, None) is not None for finder in finders)
