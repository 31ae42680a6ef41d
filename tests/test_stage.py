import asyncio
import inspect
import threading

import pytest
import torch

import perfladder as pl
from perfladder.errors import InputError
from perfladder.instrument import Observer, any_mark, instrument, known_marks, mark_site
from perfladder.marks import stage
from perfladder.sites import resolve_site


class Log(Observer):
    def __init__(self):
        self.events = []

    def enter(self, site, args, kwargs):
        self.events.append(("enter", site.path, threading.get_ident()))
        return site.path

    def leave(self, site, token, result):
        assert token == site.path
        self.events.append(("leave", site.path, threading.get_ident()))

    def enter_item(self, site):
        self.events.append(("item", site.path, threading.get_ident()))
        return site.path

    @property
    def shown(self):
        return [f"{kind} {path}" for kind, path, _ in self.events]


@pytest.fixture
def log():
    return Log()


@stage("double")
def double(x):
    return 2 * x


@stage("count")
def count_up(n):
    yield from range(n)


@stage("fetch")
async def fetch(x):
    await asyncio.sleep(0)
    return x


@stage("stream")
async def stream(n):
    for index in range(n):
        await asyncio.sleep(0)
        yield index


def test_it_is_the_public_name():
    assert pl.stage is stage


def test_marked_functions_are_what_they_were():
    assert double(3) == 6
    assert list(count_up(3)) == [0, 1, 2]
    assert asyncio.run(fetch(1)) == 1
    assert inspect.iscoroutinefunction(fetch)
    assert double.__name__ == "double"
    assert str(inspect.signature(double)) == "(x)"


def test_function_and_block_are_observed(log):
    with instrument([mark_site("double"), mark_site("block")], log) as state:
        with stage("block"):
            double(1)
        with stage("another"):
            pass
    double(1)
    assert log.shown == ["enter block", "enter double", "leave double", "leave block"]
    assert (state.lost, state.num_cut_off) == ([], 0)


def test_every_mark_can_be_observed_by_one_site(log):
    with instrument([any_mark(), mark_site("double")], log):
        double(1)
        with stage("unheard of"):
            pass
    assert log.shown == ["enter double", "leave double", "enter unheard of", "leave unheard of"], "each only once"


def test_two_observers_are_both_told(log):
    other = Log()
    with instrument([any_mark()], log), instrument([mark_site("double")], other):
        double(1)
    assert log.shown == other.shown == ["enter double", "leave double"]


def test_methods_static_and_class_methods(log):
    class Pipe:
        @stage("plain")
        def plain(self, x):
            return x

        @staticmethod
        @stage("static")
        def static(x):
            return x

        @classmethod
        @stage("of class")
        def of_class(cls, x):
            return x

    with instrument([any_mark()], log):
        assert [Pipe().plain(1), Pipe.static(2), Pipe.of_class(3)] == [1, 2, 3]
    assert len(log.shown) == 6


def test_each_item_of_a_generator_is_a_span(log):
    with instrument([any_mark()], log):
        assert list(count_up(2)) == [0, 1]
    assert log.shown == ["enter count", "leave count", *["item count", "leave count"] * 3]


def test_generator_made_before_is_no_span_and_one_that_outlives_is_none_any_more(log):
    before = count_up(3)
    with instrument([any_mark()], log):
        next(before)
        after = count_up(2)
        next(after)
    assert next(after) == 1
    assert next(before) == 1
    assert log.shown == ["enter count", "leave count", "item count", "leave count"]


def test_coroutines_and_async_generators_are_observed_without_their_waiting(log):
    async def main():
        return [await fetch(1), [item async for item in stream(2)]]

    with instrument([any_mark()], log):
        assert asyncio.run(main()) == [1, [0, 1]]
    assert log.shown.count("item fetch") == 2
    assert log.shown.count("item stream") == 5, "two items and the end, two of them with one pause inside"
    assert log.shown.count("leave stream") == 6


def test_blocks_of_two_tasks_do_not_close_each_other(log):
    order = []

    async def work(name, turns):
        with stage(name):
            for _ in range(turns):
                await asyncio.sleep(0)
        order.append(name)

    async def main():
        await asyncio.gather(work("long", 3), work("short", 1))

    with instrument([any_mark()], log) as state:
        asyncio.run(main())
    assert order == ["short", "long"]
    assert log.shown == ["enter long", "enter short", "leave short", "leave long"]
    assert state.num_cut_off == 0


def test_one_object_is_reentrant_and_recursion_nests(log):
    again = stage("again")

    def descend(depth):
        with again:
            if depth:
                descend(depth - 1)

    with instrument([any_mark()], log):
        descend(2)
    assert log.shown == ["enter again"] * 3 + ["leave again"] * 3


def test_threads_have_spans_of_their_own(log):
    shared = stage("shared")
    barrier = threading.Barrier(2, timeout=10)

    def work():
        with shared:
            barrier.wait()
            double(1)
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    with instrument([any_mark()], log) as state:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert state.num_cut_off == 0
    for ident in {ident for *_, ident in log.events}:
        own = [f"{kind} {path}" for kind, path, thread in log.events if thread == ident]
        assert own == ["enter shared", "enter double", "leave double", "leave shared"]


def test_block_that_began_before_ends_without_a_trace(log):
    outer = stage("outer")
    with outer, instrument([any_mark()], log):
        double(1)
        with outer:
            pass
    assert log.shown == ["enter double", "leave double", "enter outer", "leave outer"]


def test_error_passes_and_closes(log):
    def fail():
        with stage("failing"):
            raise ValueError("no")

    with instrument([any_mark()], log), pytest.raises(ValueError, match="no"):
        fail()
    assert log.shown == ["enter failing", "leave failing"]


@pytest.mark.parametrize("wrong", [print, None, "", "*"])
def test_a_name_is_needed(wrong):
    with pytest.raises(InputError, match="needs a name"):
        stage(wrong)(double)


@pytest.mark.parametrize("wrong", [int, classmethod(print)])
def test_what_cannot_be_marked_is_refused(wrong):
    with pytest.raises(InputError, match="marks functions and methods"):
        stage("wrong")(wrong)


def test_decorated_names_are_known_and_resolve_to_their_mark():
    assert "double" in known_marks()
    site = resolve_site(object(), "double")
    assert site is mark_site("double")
    assert (site.is_mark, site.is_module, site.owner_type) == (True, False, "perfladder.stage")


def test_mark_inside_compiled_code_adds_no_guard_and_no_break(log):
    from torch._dynamo.testing import CompileCounter

    def compute(x):
        with stage("inside"):
            return double(x) + 1

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    expected = compiled(torch.ones(2))
    with instrument([any_mark()], log):
        assert torch.equal(compiled(torch.ones(2)), expected)
    assert counter.frame_count == 1, "observing does not compile again"
    assert log.shown == []
