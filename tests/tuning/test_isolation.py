"""A first build that crashes, hangs or eats memory costs its candidate only, and leaves no process behind."""

import os
import threading
import uuid

import hostile
import processes
import pytest
import torch
import toys

import perfladder as pl

pytestmark = pytest.mark.slow

EAGER = pl.backend.TorchEagerBackend()


@pytest.fixture
def mark(monkeypatch):
    """All processes of the test carry it, and none is left when it ends."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, value)
    monkeypatch.setenv("PERFLADDER_TEST_PARENT", str(os.getpid()))
    yield value
    processes.wait_until(lambda: not [pid for pid in processes.marked(value) if pid != os.getpid()], limit_s=10)


@pytest.fixture
def tried(clock, mark):
    """Try a backend before a good one; returns what is known of it."""

    def run(backend, module=None):
        wrapper = pl.Module(module or toys.Toy(), strategy=pl.FirstWinsStrategy([backend, EAGER]))
        report = pl.tune(wrapper, toys.samples(), clock=clock)
        assert report.modules[0].error is None
        assert wrapper.state == "tuned"
        assert torch.equal(wrapper(torch.ones(1, 4)), torch.tensor([[1.0, 2, 3, 4]]))
        return report.modules[0].graphs[0].decision.candidates[0]

    return run


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (hostile.Exits(), "its process ended: it exited with code 3. Its last output:\nabout to leave"),
        (hostile.ExitsQuietly(), "its process ended: it exited with code 0. It printed nothing"),
        (hostile.Segfaults(), "its process ended: killed by SIGSEGV"),
        (hostile.CrashesWhenRun(), "its process ended: killed by SIGABRT"),
        (hostile.Raises(), "NotImplementedError: an operator is not supported"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_crash_is_told(tried, backend, says):
    found = tried(backend)
    assert found.status == "failed"
    assert found.reason.startswith(says)
    assert found.trial_s > 0
    assert found.build_s is None, "it is not built here"


def test_a_hang_is_ended_with_all_that_it_started(tried):
    pl.config.build_timeout_s = 8.0
    found = tried(hostile.Hangs())
    assert (found.status, found.reason) == ("failed", "it did not end within 8 s (config.build_timeout_s)")


def test_memory_above_the_limit_ends_it(tried):
    pl.config.build_max_memory_bytes = 700 << 20
    found = tried(hostile.EatsMemory())
    assert found.status == "failed"
    assert found.reason.startswith("it took ")
    assert found.reason.endswith(f"the limit is {700 << 20}")
    assert found.peak_host_rss_bytes > 700 << 20


def test_a_good_build_is_made_here_after_it_was_tried(tried):
    found = tried(hostile.Leaves())
    assert (found.status, toys.builds["faster"]) == ("rejected", 1)
    assert "zero" in found.reason, "the clock of the test stands still: it is right, and not timed"
    assert found.trial_s > 0
    assert found.build_s is not None


def test_another_limit_is_another_try(clock, mark):
    pl.config.build_timeout_s = 0.5
    toy = toys.Toy()

    def candidate():
        report = pl.tune(
            pl.Module(toy, strategy=pl.FirstWinsStrategy([hostile.Exits(), EAGER])), toys.samples(), clock=clock
        )
        return report.modules[0].graphs[0].decision.candidates[0]

    assert "did not end within 0.5 s" in candidate().reason
    assert candidate().is_reused
    pl.config.build_timeout_s = 60.0
    assert "exited with code 3" in candidate().reason


class Unsendable(toys.Toy):
    """Holds what cannot be sent to another process."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_sent_is_told(tried):
    found = tried(hostile.Leaves(), Unsendable())
    assert found.status == "failed"
    assert "the module cannot be sent there (cannot pickle" in found.reason
    assert "Set config.isolate_builds = False to build it in this process" in found.reason


def test_without_isolation_it_is_built_here_only(tried):
    pl.config.isolate_builds = False
    found = tried(hostile.Leaves(), Unsendable())
    assert found.status == "rejected"
    assert toys.builds["faster"] == 1
    assert found.trial_s == 0


def test_the_child_keeps_what_compilers_write_in_our_folder(tried):
    tried(hostile.Raises())
    assert (pl.config.cache_dir / "inductor").is_dir()
