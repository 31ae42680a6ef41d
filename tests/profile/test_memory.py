from perfladder.instrument import Site
from perfladder.profiling.discover import find_sites
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
