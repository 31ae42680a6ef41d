import torch

from perfladder.instrument import Site
from perfladder.profiling import window
from perfladder.profiling.discover import find_sites
from perfladder.profiling.memory import MemoryWatch
from perfladder.profiling.observers import MemoryObserver, Peak
from perfladder.profiling.window import Call, profile_runs


class Allocator:
    """An allocator as a device has it: what is there, and the most since the last reset."""

    def __init__(self, allocated: int = 100) -> None:
        self.allocated = self.most = allocated

    def change(self, by: int) -> None:
        self.allocated += by
        self.most = max(self.most, self.allocated)

    def read(self) -> tuple[int, int]:
        return self.allocated, self.most

    def reset(self) -> None:
        self.most = self.allocated


def test_a_peak_inside_counts_for_the_outer_call_and_not_for_its_neighbour():
    memory = Allocator()
    observer = MemoryObserver(memory)
    outer, first, second = (Site(name, object()) for name in ("outer", "outer.first", "outer.second"))
    token = observer.enter(outer, (), {})
    memory.change(+50)
    memory.change(-50)
    inner = observer.enter(first, (), {})
    memory.change(+1000)
    memory.change(-900)
    observer.leave(first, inner, None)
    inner = observer.enter(second, (), {})
    memory.change(+10)
    observer.leave(second, inner, None)
    observer.leave(outer, token, None)
    assert observer.peaks == {
        "outer.first": Peak(peak_bytes=1100, increase_bytes=1000),
        "outer.second": Peak(peak_bytes=210, increase_bytes=10),
        "outer": Peak(peak_bytes=1100, increase_bytes=1000),
    }


def test_the_outer_calls_own_peak_before_an_inner_call_is_kept():
    memory = Allocator()
    observer = MemoryObserver(memory)
    outer, inner = Site("outer", object()), Site("inner", object())
    token = observer.enter(outer, (), {})
    memory.change(+700)
    memory.change(-700)
    observer.leave(inner, observer.enter(inner, (), {}), None)
    observer.leave(outer, token, None)
    assert observer.peaks["outer"] == Peak(800, 700)
    assert observer.peaks["inner"] == Peak(100, 0)


def test_the_most_over_several_calls_is_reported():
    memory = Allocator()
    observer = MemoryObserver(memory)
    site = Site("part", object())
    for size in (5, 30, 20):
        token = observer.enter(site, (), {})
        memory.change(+size)
        memory.change(-size)
        observer.leave(site, token, None)
    assert observer.peaks["part"] == Peak(130, 30)


def test_peaks_are_taken_in_the_warmup_inside_the_window(pipe, x, tmp_path):
    memory = Allocator()
    forward = pipe.unet.forward

    def allocating(value):
        memory.change(+64)
        result = forward(value)
        memory.change(-64)
        return result

    pipe.unet.forward = allocating
    sites = find_sites(pipe)
    profiled = profile_runs(sites, [Call(lambda: pipe(x))], repeats=2, trace_path=tmp_path / "trace.json", meter=memory)
    assert profiled.peaks["unet"] == Peak(164, 64)
    assert profiled.peaks["vae.decode"] == Peak(100, 0)
    assert pipe.num_calls == 3


class Growing:
    """Memory that grows by the same amount each time that it is read."""

    def __init__(self, step_bytes: int) -> None:
        self.held = -step_bytes
        self.step_bytes = step_bytes

    def __call__(self) -> int:
        self.held += self.step_bytes
        return self.held


def test_a_run_is_made_only_if_one_like_the_last_still_fits():
    watch = MemoryWatch(35, Growing(10))
    seen = []
    for _ in range(4):
        watch.note()
        seen.append(watch.has_room())
    assert watch.grown == [10, 20, 30, 40]
    assert seen == [True, True, False, False]
    assert not MemoryWatch(35, Growing(0)).grown


def test_each_scenario_has_its_share():
    watch = MemoryWatch(40, Growing(10))
    watch.note()
    assert watch.has_room(share=0.5)
    watch.note()
    assert not watch.has_room(share=0.5)
    assert watch.has_room()


def test_a_window_stops_early_at_its_memory_limit_and_says_so(pipe, x, tmp_path, monkeypatch):
    """R19, R20: the profiler keeps every event until it stops."""
    watch = MemoryWatch(35, Growing(10))
    monkeypatch.setattr(window.MemoryWatch, "of_this_process", lambda _: watch)
    calls = [Call(lambda: pipe(x), name="a"), Call(lambda: pipe(x), name="b")]
    with torch.no_grad():
        profiled = window.profile_runs(find_sites(pipe), calls, repeats=5, trace_path=tmp_path / "trace.json")
    assert profiled.call_names == ["a", "b"]
    assert len(profiled.report.runs) == len(profiled.wall_time_us) == 2
    message = {w.code: w.message for w in profiled.warnings}["WINDOW_CUT_SHORT"]
    assert message.startswith("Profiled 2 of 10 runs: memory grew by ")


def test_a_process_that_really_grows_is_stopped(pipe, x, tmp_path):
    kept = []
    call = Call(lambda: kept.append(torch.ones(40_000_000, dtype=torch.uint8)) or pipe(x))
    with torch.no_grad():
        profiled = profile_runs(
            find_sites(pipe), [call], repeats=9, trace_path=tmp_path / "trace.json", memory_limit_bytes=170_000_000
        )
    assert 1 <= len(profiled.report.runs) <= 4
    assert "WINDOW_CUT_SHORT" in {warning.code for warning in profiled.warnings}


def test_this_process_is_watched():
    watch = MemoryWatch.of_this_process(1 << 40)
    watch.note()
    assert watch.has_room()
    assert 0 < MemoryWatch.of_this_process().limit_bytes <= 4 << 30
