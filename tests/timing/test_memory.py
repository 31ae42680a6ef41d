import mmap
import subprocess
import sys
import threading

import pytest
import torch

from perfladder import _torch_private
from perfladder.instrument import Site
from perfladder.timing import memory
from perfladder.timing.memory import Reading, ResidentMeter, StagePeaks, TreeWatch, find_growth, measure_memory

KIB = 1 << 10
A, B, C = (Site(name, object()) for name in "abc")


class FakeMeter:
    """Memory that a test uses and frees."""

    def __init__(self):
        self.now = self.peak = 0
        self.reserved = self.peak_reserved = 0

    def use(self, change):
        self.now += change
        self.peak = max(self.peak, self.now)
        self.reserved = max(self.reserved, self.now)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def spike(self, size):
        self.use(size)
        self.use(-size)

    def read(self):
        return Reading(self.now, self.peak, self.peak_reserved)

    def reset(self):
        self.peak, self.peak_reserved = self.now, self.reserved


@pytest.fixture
def meter():
    return FakeMeter()


@pytest.fixture
def peaks(meter):
    return StagePeaks(meter)


def test_outer_stage_has_the_peaks_of_the_inner_ones(meter, peaks):
    outer = peaks.enter(A, (), {})
    meter.spike(10)
    inner = peaks.enter(B, (), {})
    meter.use(50)
    meter.use(-40)
    peaks.leave(B, inner, None)
    meter.spike(20)
    peaks.leave(A, outer, None)
    found = peaks.finish()
    assert (found["a"].peak_bytes, found["a"].self_peak_bytes, found["a"].increase_bytes) == (50, 30, 50)
    assert (found["b"].peak_bytes, found["b"].self_peak_bytes, found["b"].increase_bytes) == (50, 50, 50)
    assert found["a"].reserved_bytes == found["b"].reserved_bytes == 50


def test_peak_of_the_outer_part_is_not_the_inner_stages(meter, peaks):
    outer = peaks.enter(A, (), {})
    meter.spike(90)
    inner = peaks.enter(B, (), {})
    meter.use(5)
    peaks.leave(B, inner, None)
    meter.spike(80)
    peaks.leave(A, outer, None)
    meter.spike(200)
    found = peaks.finish()
    assert (found["b"].peak_bytes, found["a"].self_peak_bytes) == (5, 90)
    assert peaks.peak_bytes == 205, "outside every stage too"


def test_increase_is_over_what_was_there_and_the_most_of_several_calls(meter, peaks):
    meter.use(100)
    for size in (7, 30, 9):
        token = peaks.enter(A, (), {})
        meter.spike(size)
        peaks.leave(A, token, None)
    found = peaks.finish()["a"]
    assert (found.peak_bytes, found.increase_bytes) == (130, 30)


def test_recursion_counts_each_level(meter, peaks):
    outer = peaks.enter(A, (), {})
    meter.use(10)
    inner = peaks.enter(A, (), {})
    meter.spike(10)
    peaks.leave(A, inner, None)
    peaks.leave(A, outer, None)
    assert peaks.finish()["a"].increase_bytes == 20


def test_calls_on_other_threads_are_left_out(meter, peaks):
    thread = threading.Thread(target=lambda: peaks.leave(A, peaks.enter(A, (), {}), None))
    thread.start()
    thread.join()
    assert peaks.finish() == {}


# Growth


@pytest.mark.parametrize(
    ("after_runs", "is_growing"),
    [
        ([0] * 5, False),
        ([100 * KIB] * 10, False),
        ([100 * KIB * n for n in range(10)], True),
        ([0, 900, 1000, 1010, 1010, 1010, 1010, 1010, 1010, 1010], False),
        ([KIB * n for n in range(10)], False),
        ([0, 500 * KIB, 0, 500 * KIB, 0, 500 * KIB, 0, 500 * KIB, 0, 500 * KIB], False),
        ([KIB * n for n in (0, 400, 800, 1200, 1200, 1200, 1200, 1200, 1200, 1200)], False),
        ([KIB * n for n in (0, 0, 200, 200, 400, 400, 600, 600, 800, 800)], True),
    ],
    ids=["few", "equal", "leak", "small", "tiny", "sawtooth", "filling cache", "stairs"],
)
def test_growth_is_a_leak_when_it_goes_on(after_runs, is_growing):
    assert find_growth(after_runs, noise_bytes=64 * KIB).is_growing is is_growing


def test_slope_is_told():
    assert find_growth([100 * KIB * n for n in range(10)], noise_bytes=KIB).bytes_per_run == 100 * KIB


# What the system tells


def test_kernel_tells_the_peak_between_two_readings():
    try:
        meter = ResidentMeter()
    except OSError:
        pytest.skip("this kernel lets nobody reset the peak")
    before = meter.read()
    with mmap.mmap(-1, 16 << 20) as block:  # given back when closed, which an allocator may put off
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert meter.read().peak - before.current >= 15 << 20
    meter.reset()
    assert meter.read().peak - before.current < 8 << 20


def test_tree_has_the_memory_of_children_too():
    code = "x = bytearray(40 << 20); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        watch = TreeWatch()
        watch._look()
    finally:
        child.communicate(b"\n")
    assert watch.seen.num_processes >= 2
    assert watch.seen.peak_tree_bytes - watch.seen.peak_process_bytes >= 40 << 20


def test_memory_run_names_the_stage_that_needs_most(wrap):
    class Pipe:
        def __init__(self):
            self.small, self.large = torch.nn.Identity(), torch.nn.Identity()
            self.small.forward = lambda: None
            self.large.forward = lambda: torch.ones(32 << 20, dtype=torch.uint8).sum()

        def __call__(self):
            self.small()
            self.large()

    pipe = Pipe()
    by_stage, host = measure_memory(wrap(pipe), [Site("small", pipe.small), Site("large", pipe.large)])
    assert host.num_looks >= 1
    assert host.peak_process_bytes > 0
    if by_stage:
        assert by_stage["large"].increase_bytes >= 30 << 20
        assert by_stage["small"].increase_bytes < 8 << 20


def test_without_the_kernels_peak_there_are_no_stage_peaks(wrap, monkeypatch):
    def refuse():
        raise PermissionError("no")

    monkeypatch.setattr(memory, "ResidentMeter", refuse)
    by_stage, host = measure_memory(wrap(lambda: None), [])
    assert by_stage == {}
    assert host.peak_process_bytes > 0


def test_allocator_is_read_by_its_fields(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2}},
        "reserved_bytes": {"all": {"current": 3, "peak": 4}},
    }
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", lambda index: stats, raising=False)
    assert tuple(_torch_private.allocator_state(torch.device("cuda", 0))) == (1, 2, 3, 4)


def test_calls_that_look_the_same_are_kept_apart(meter, peaks):
    # Recursive calls of one stage begin with the same numbers; each ends as itself.
    outer = peaks.enter(A, (), {})
    inner = peaks.enter(A, (), {})
    meter.use(10 * KIB)
    peaks.leave(A, inner, None)
    meter.use(10 * KIB)
    peaks.leave(A, outer, None)
    assert peaks.finish()["a"].increase_bytes == 20 * KIB
