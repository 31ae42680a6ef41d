import asyncio
import functools
import inspect
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from perfladder.errors import InputError
from perfladder.instrument import Observer, Site, instrument
from perfladder.object_parts import attribute_at, named_modules_of, set_attribute_at
from perfladder.sites import module_sites, resolve_site, resolve_sites, stage_sites


class Log(Observer):
    """Notes every event by the site's path."""

    def __init__(self):
        self.events = []

    def enter(self, site, args, kwargs):
        self.events.append(("enter", site.path))
        return site.path

    def leave(self, site, token, result):
        assert token == site.path
        self.events.append(("leave", site.path, result))

    def enter_item(self, site):
        self.events.append(("item", site.path))
        return site.path

    def count(self, kind):
        return sum(event[0] == kind for event in self.events)


def flat(events):
    return [(kind[0] == "l" and ")") or "(" for kind, *_ in events]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.ReLU()
        self.again = self.b

    def forward(self, x):
        return self.again(self.b(self.a(x)))


class Pipe:
    def __init__(self):
        self.net = Net()
        self.blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
        self.parts = {"vae": nn.Linear(2, 2)}
        self.size = 3

    def __call__(self, x):
        return self.decode(self.net(x))

    def decode(self, x, *, scale: float = 1.0):
        """Scale it."""
        return x * scale

    def chunks(self, n):
        received = []
        for index in range(n):
            received.append((yield index))
        return received

    async def fetch(self, value):
        await asyncio.sleep(0)
        return value

    async def stream(self, n):
        for index in range(n):
            await asyncio.sleep(0)
            yield index

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def kind(cls):
        return cls.__name__

    @property
    def computed(self):
        return lambda: "computed"


X = torch.ones(1, 2)


@pytest.fixture
def pipe():
    return Pipe()


@pytest.fixture
def log():
    return Log()


def hook_state(module):
    names = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    )
    return [dict(getattr(m, name)) for m in module.modules() for name in names]


# Modules


def test_shared_module_is_hooked_once_and_its_other_names_are_aliases(log):
    net = Net()
    sites = [Site("b", net.b), Site("again", net.again)]
    with instrument(sites, log) as state:
        assert len(net.b._forward_hooks) == 1
        net(X)
    assert state.aliases == {"again": "b"}
    assert log.events.count(("enter", "b")) == 2


def test_module_stored_under_two_pipelines_is_hooked_once(log):
    class Both:
        def __init__(self):
            self.first, self.second = Pipe(), Pipe()
            self.second.net = self.first.net

    both = Both()
    with instrument(resolve_sites(both, ["first.net", "second.net"]), log) as state:
        both.second(X)
    assert state.aliases == {"second.net": "first.net"}
    assert log.count("enter") == 1


def test_hook_dicts_are_as_before(pipe, log):
    other = pipe.net.a.register_forward_hook(lambda *_: None)
    before = hook_state(pipe.net)
    with instrument(module_sites(pipe.net), log):
        pipe.net(X)
    assert hook_state(pipe.net) == before
    other.remove()


def test_calls_nest_and_carry_their_results(log):
    net = Net()
    with instrument(module_sites(net, "net"), log):
        result = net(X)
    assert [event[:2] for event in log.events] == [
        ("enter", "net"),
        ("enter", "net.a"),
        ("leave", "net.a"),
        ("enter", "net.b"),
        ("leave", "net.b"),
        ("enter", "net.b"),
        ("leave", "net.b"),
        ("leave", "net"),
    ]
    assert log.events[-1][2] is result


def test_keyword_arguments_are_seen(pipe):
    seen = []

    class Look(Observer):
        def enter(self, site, args, kwargs):
            seen.append((args, sorted(kwargs)))

    with instrument([Site("a", pipe.net.a)], Look()):
        pipe.net.a(input=X)
    assert seen == [((), ["input"])]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_unwinds_every_open_call(pipe, log, error):
    def fail(*_):
        raise error

    pipe.net.b.forward = fail
    with pytest.raises(error), instrument([*module_sites(pipe.net, "net"), Site("decode", pipe, "decode")], log):
        pipe(X)
    assert log.count("enter") == log.count("leave")
    assert "decode" not in vars(pipe)


def test_calls_that_an_interrupt_left_open_are_counted(pipe, log):
    def fail(*_):
        raise KeyboardInterrupt

    pipe.net.b.forward = fail
    with instrument(module_sites(pipe.net, "net"), log) as state:
        with pytest.raises(KeyboardInterrupt):
            pipe.net(X)
        assert pipe.net.a(X) is not None
    assert state.num_cut_off == 2
    assert log.events[-1] == ("leave", "net", None)


def test_hooks_that_other_code_removed_are_named_as_lost(pipe, log):
    sites = [Site("net", pipe.net), Site("a", pipe.net.a), Site("decode", pipe, "decode")]
    with instrument(sites, log) as state:
        pipe.net._forward_hooks.clear()
        pipe.decode = lambda x: x
    assert state.lost == ["decode", "net"]
    assert hook_state(pipe.net) == hook_state(Net())


def test_recursive_module_closes_the_innermost_call_first(log):
    class Tree(nn.Module):
        def forward(self, depth):
            return depth if depth == 0 else self(depth - 1)

    tree = Tree()
    with instrument([Site("tree", tree)], log):
        tree(2)
    assert flat(log.events) == ["(", "(", "(", ")", ")", ")"]


def test_scripted_module_is_observed_or_named(log):
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted = torch.jit.script(nn.ReLU())
    with instrument([Site("s", scripted)], log) as state:
        scripted(X)
    assert log.count("enter") == 1 or "s" in state.unobservable


def test_threads_have_stacks_of_their_own(pipe, log):
    barrier = threading.Barrier(2, timeout=10)

    def decode(x):
        barrier.wait()
        return x

    pipe.decode = decode
    with instrument([Site("decode", pipe, "decode")], log) as state:
        threads = [threading.Thread(target=pipe.decode, args=(X,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert flat(log.events) == ["(", "(", ")", ")"]
    assert state.num_cut_off == 0
    assert vars(pipe)["decode"] is decode


def test_a_thread_that_goes_on_after_the_block_is_observed_no_more(pipe, log):
    inside, go = threading.Event(), threading.Event()

    def decode(x):
        inside.set()
        go.wait(10)

    pipe.decode = decode
    with instrument([Site("decode", pipe, "decode")], log) as state:
        thread = threading.Thread(target=pipe.decode, args=(X,))
        thread.start()
        assert inside.wait(10)
    num_events = len(log.events)
    go.set()
    thread.join()
    assert state.num_cut_off == 1
    assert len(log.events) == num_events == 2


# Methods


def test_method_wrapper_keeps_the_signature_and_vanishes(pipe, log):
    before = inspect.signature(pipe.decode)
    with instrument([Site("decode", pipe, "decode")], log):
        assert inspect.signature(pipe.decode) == before
        assert pipe.decode.__doc__ == "Scale it."
        pipe.decode(X, scale=2.0)
    assert "decode" not in vars(pipe)
    assert log.count("enter") == 1


def test_function_kept_in_an_attribute_is_put_back(pipe, log):
    pipe.decode = original = lambda x: x
    with instrument([Site("decode", pipe, "decode")], log):
        pipe.decode(X)
    assert vars(pipe)["decode"] is original


@pytest.mark.parametrize(("name", "arguments", "expected"), [("static", (1,), 2), ("kind", (), "Pipe")])
def test_static_and_class_methods_are_observed(pipe, log, name, arguments, expected):
    with instrument([Site(name, pipe, name)], log):
        assert getattr(pipe, name)(*arguments) == expected
    assert log.events[-1] == ("leave", name, expected)
    assert name not in vars(pipe)


def test_property_that_makes_a_function_is_named_as_unobservable(pipe, log):
    with instrument([Site("computed", pipe, "computed")], log) as state:
        assert pipe.computed() == "computed"
    assert "a property" in state.unobservable["computed"]
    assert "computed" not in vars(pipe)


def test_object_without_attributes_of_its_own_is_named_as_unobservable(log):
    class Slotted:
        __slots__ = ()

        def step(self):
            return 1

    owner = Slotted()
    with instrument([Site("step", owner, "step")], log) as state:
        assert owner.step() == 1
    assert "slots" in state.unobservable["step"]
    assert state.sites == []


def test_frozen_and_odd_objects_are_observed_without_their_setattr(log):
    @dataclass(frozen=True)
    class Frozen:
        value: int = 1

        def step(self):
            return self.value

    class Odd:
        def __setattr__(self, name, value):
            raise RuntimeError("no")

        def step(self):
            return 2

    frozen, odd = Frozen(), Odd()
    with instrument([Site("frozen", frozen, "step"), Site("odd", odd, "step")], log):
        assert (frozen.step(), odd.step()) == (1, 2)
    assert log.count("enter") == 2
    assert (vars(frozen), vars(odd)) == ({"value": 1}, {})


def test_method_of_a_module_is_observed(log):
    class Vae(nn.Module):
        def decode(self, x):
            return x

    vae = Vae()
    with instrument([Site("vae.decode", vae, "decode")], log):
        vae.decode(X)
    assert log.count("enter") == 1
    assert "decode" not in vars(vae)


class Tokenizer:
    limit = 77

    def __call__(self, text):
        return text.split()

    def decode(self, words):
        return " ".join(words)


def test_callable_object_is_observed_and_stays_what_it_is(log):
    class Holder:
        def __init__(self):
            self.tokenizer, self.other = Tokenizer(), Tokenizer()

    holder = Holder()
    tokenizer = holder.tokenizer
    with instrument([resolve_site(holder, "tokenizer")], log):
        assert holder.tokenizer("a b") == ["a", "b"]
        assert holder.other("c") == ["c"]
        assert holder.tokenizer.limit == 77
        assert holder.tokenizer.decode(["a"]) == "a"
        assert holder.tokenizer is tokenizer
        assert isinstance(tokenizer, Tokenizer)
        assert type(tokenizer).__name__ == "Tokenizer"
    assert type(tokenizer) is Tokenizer
    assert [event[:2] for event in log.events] == [("enter", "tokenizer"), ("leave", "tokenizer")]


def test_callable_object_that_cannot_be_observed_is_named(log):
    class Holder:
        def __init__(self):
            self.fast = functools.partial(max, 1)
            self.getter = __import__("operator").itemgetter(0)

    holder = Holder()
    with instrument(resolve_sites(holder, ["fast", "getter"]), log) as state:
        assert holder.fast(3) == 3
        assert holder.getter([5]) == 5
    assert list(state.unobservable) == ["getter"]
    assert log.count("enter") == 1


def test_method_bound_inside_the_block_is_observed_no_more_after_it(pipe, log):
    with instrument([Site("decode", pipe, "decode")], log):
        kept = pipe.decode
    kept(X)
    assert log.events == []


# Generators and coroutines


def test_generator_is_observed_once_for_each_resumption(pipe, log):
    with instrument([Site("chunks", pipe, "chunks")], log):
        made = pipe.chunks(2)
        assert inspect.isgenerator(made)
        assert list(made) == [0, 1]
    assert (log.count("enter"), log.count("item"), log.count("leave")) == (1, 3, 4)
    assert flat(log.events) == ["(", ")"] * 4, "nothing is open while the consumer has the item"


def test_generator_receives_what_is_sent_and_returns_its_value(pipe, log):
    with instrument([Site("chunks", pipe, "chunks")], log):
        made = pipe.chunks(2)
        assert next(made) == 0
        assert made.send("first") == 1
        with pytest.raises(StopIteration) as stop:
            made.send("second")
    assert stop.value.value == ["first", "second"]


def test_exception_thrown_into_a_generator_arrives_inside(log):
    class Source:
        def items(self):
            while True:
                try:
                    yield "item"
                except ValueError as error:
                    yield f"caught {error}"

    source = Source()
    with instrument([Site("items", source, "items")], log):
        made = source.items()
        next(made)
        assert made.throw(ValueError("it")) == "caught it"
        with pytest.raises(KeyError):
            made.throw(KeyError)
    assert log.count("leave") == log.count("enter") + log.count("item")


def test_closing_a_generator_runs_its_finally(log):
    closed = []

    class Source:
        def items(self):
            try:
                yield 1
            finally:
                closed.append(True)

    source = Source()
    with instrument([Site("items", source, "items")], log):
        made = source.items()
        next(made)
        made.close()
    assert closed == [True]


def test_generator_that_outlives_the_block_works_and_is_observed_no_more(pipe, log):
    with instrument([Site("chunks", pipe, "chunks")], log):
        made = pipe.chunks(3)
        next(made)
    num_events = len(log.events)
    assert list(made) == [1, 2]
    assert len(log.events) == num_events


def test_module_that_yields_is_observed_for_each_item(log):
    class Streamer(nn.Module):
        def forward(self, n):
            yield from range(n)

    streamer = Streamer()
    with instrument([Site("s", streamer)], log):
        assert list(streamer(2)) == [0, 1]
    assert log.count("item") == 3


def test_coroutine_is_observed_around_its_await_free_parts(pipe, log):
    with instrument([Site("fetch", pipe, "fetch")], log):
        assert inspect.iscoroutinefunction(pipe.fetch)
        assert asyncio.run(pipe.fetch(5)) == 5
    assert (log.count("enter"), log.count("item")) == (1, 2)
    assert flat(log.events) == ["(", ")"] * 3
    assert "fetch" not in vars(pipe)


def test_two_coroutines_at_once_do_not_close_each_other(pipe, log):
    async def both():
        return await asyncio.gather(pipe.fetch(1), pipe.fetch(2))

    with instrument([Site("fetch", pipe, "fetch")], log) as state:
        assert asyncio.run(both()) == [1, 2]
    assert flat(log.events) == ["(", ")"] * 6
    assert state.num_cut_off == 0


def test_cancelled_coroutine_is_closed(pipe, log):
    async def cancel():
        task = asyncio.create_task(pipe.fetch(1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with instrument([Site("fetch", pipe, "fetch")], log):
        asyncio.run(cancel())
    assert log.count("leave") == log.count("enter") + log.count("item")


def test_async_generator_is_observed_for_each_item(pipe, log):
    async def consume():
        return [item async for item in pipe.stream(2)]

    with instrument([Site("stream", pipe, "stream")], log):
        assert asyncio.run(consume()) == [0, 1]
    assert log.count("item") > 2
    assert flat(log.events) == ["(", ")"] * (len(log.events) // 2)


def test_async_generator_keeps_send_throw_and_close(log):
    closed = []

    class Source:
        async def items(self):
            try:
                try:
                    got = yield 1
                    yield got
                except ValueError:
                    yield "caught"
            finally:
                closed.append(True)

    source = Source()

    async def drive():
        sent = source.items()
        await sent.__anext__()
        assert await sent.asend("hello") == "hello"
        await sent.aclose()
        thrown = source.items()
        await thrown.__anext__()
        assert await thrown.athrow(ValueError) == "caught"
        await thrown.aclose()

    with instrument([Site("items", source, "items")], log):
        asyncio.run(drive())
    assert closed == [True, True]


# Paths


def test_path_through_lists_dicts_and_attributes(pipe):
    assert attribute_at(pipe, "blocks.1", field_name="stages") is pipe.blocks[1]
    assert attribute_at(pipe, "parts.vae", field_name="stages") is pipe.parts["vae"]
    assert attribute_at(pipe, "", field_name="stages") is pipe


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nett", r"stages: the target \(Pipe\) has no 'nett'. Did you mean 'net'"),
        ("net.aa", "stages: net has no 'aa'. Did you mean 'a'"),
        ("blocks.2", "stages: blocks has no '2'.*Known names there: 0, 1"),
        ("parts.vea", "stages: parts has no 'vea'. Did you mean 'vae'"),
        ("size", "stages: 'size' is a int; a call site is a module or a method"),
        ("decod", "Did you mean 'decode'"),
    ],
)
def test_wrong_path_suggests_near_names(pipe, path, expected):
    with pytest.raises(InputError, match=expected):
        resolve_site(pipe, path)


def test_sites_know_module_and_method(pipe):
    net, decode = resolve_sites(pipe, ["net", "decode"])
    assert (net.is_module, decode.is_module) == (True, False)
    assert decode.owner is pipe
    assert net.owner_type.endswith("Net")


def test_attribute_is_replaced_where_it_lies(pipe):
    for path in ("net", "blocks.0", "parts.vae"):
        set_attribute_at(pipe, path, "new", field_name="compile.only")
        assert attribute_at(pipe, path, field_name="stages") == "new"


def test_parts_of_a_pipeline_are_found_in_attributes_lists_and_dicts(pipe):
    assert [path for path, _ in named_modules_of(pipe)] == ["net", "blocks.0", "blocks.1", "parts.vae"]
    paths = [site.path for site in stage_sites(pipe)]
    assert {"net", "blocks.0", "parts.vae", "decode", "chunks"} <= set(paths)
    assert "__call__" not in paths


def test_pipeline_inside_a_wrapper_is_opened():
    class Wrapper:
        def __init__(self):
            self.pipe = Pipe()
            self.me = self

    assert named_modules_of(Wrapper())[0][0] == "pipe.net"


def test_stages_of_a_bare_module_are_its_children_with_lists_opened():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.ReLU(), nn.ReLU()])
            self.head = nn.ReLU()

    assert [site.path for site in stage_sites(Holder())] == ["blocks.0", "blocks.1", "head"]
    assert [site.path for site in stage_sites(nn.ReLU())] == [""]
