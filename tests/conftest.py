"""What the engine's tests share: targets written to files, workloads for them, and a clock that tests set."""

import importlib.util
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from perfladder.target import LoadedTarget
from perfladder.workload import Workload, WorkloadFile, parse_workload

# A job that a shell starts in the background ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without the servers' libraries the engine is tested, and what joins it to them is not.
collect_ignore = ["tasks", "flows"] if importlib.util.find_spec("prefect") is None else []


class FakeClock:
    """Nanoseconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, ms: float) -> None:
        self.now_ns += round(ms * 1e6)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory):
    """What runs keep about the machine stays out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _modules_and_path_as_before():
    """Targets are imported from temporary folders, under names that the next test uses again."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None) or ""
        if name not in modules and "/pytest-of-" in origin:
            del sys.modules[name]


@pytest.fixture(scope="session")
def make_workload():
    """A workload with defaults that a test may change by name."""

    def make(**fields: object) -> Workload:
        return parse_workload({"name": "test", "target": "pipe.py:build", "warmup_runs": 0, "device": "cpu", **fields})

    return make


@pytest.fixture(scope="session")
def write_target(make_workload):
    """Write a target's source to a file in `folder`, and return the workload that names it."""

    def write(folder: Path, source: str, *, filename: str = "pipe.py", **fields: object) -> WorkloadFile:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / filename).write_text(textwrap.dedent(source))
        return WorkloadFile(make_workload(**{"target": f"{filename}:build", **fields}), folder)

    return write


@pytest.fixture
def load_target(tmp_path, write_target):
    """A target loaded in this process."""

    def load(source: str, **fields: object) -> LoadedTarget:
        file = write_target(tmp_path, source, **fields)
        loaded = LoadedTarget(file.workload, file.base_dir)
        loaded.load()
        return loaded

    return load


@pytest.fixture
def wrap(make_workload):
    """An object that is already there, as a loaded target."""

    def make(obj: object, **fields: object) -> LoadedTarget:
        return LoadedTarget.of(obj, make_workload(**fields))

    return make
