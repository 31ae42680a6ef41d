"""Call sites on the user's object, whose calls are observed with hooks that always come off again.

A call site is a dotted path on the target: `unet`, `vae.decode`, `scheduler.step`, `text_encoder.encoder.layers.3`; a
phase of text generation, `model.prefill` or `model.decode`; or a mark in the user's own code (`perfladder.marks`).
Stage timing, regions, capture and kernel attribution are observers of this one primitive.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Site:
    """One observable place: the module at `path`, the method that `path` ends in, or a mark of that name.

    With a `phase`, only those calls of the module that its own `generate` makes: the first one is the prefill, which
    reads the whole prompt, and the later ones decode.
    """

    path: str
    owner: Any = field(repr=False, compare=False)
    method: str | None = None
    phase: Phase | None = None

    @property
    def is_module(self) -> bool:
        """Whether calls are those of an `nn.Module` itself, seen by its hooks."""
        return self.method is None and not self.is_mark

    @property
    def is_mark(self) -> bool:
        """Whether this is a stage that the user's own code marks."""
        return self.owner is _MARKS

    @property
    def owner_type(self) -> str:
        """Qualified class name of the module, or of the object that has the method."""
        if self.is_mark:
            return "perfladder.stage"
        return f"{type(self.owner).__module__}.{type(self.owner).__qualname__}"


class Observer:
    """What is told of each call. `enter` returns a token that comes back to `leave`."""

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins."""

    def leave(self, site: Site, token: Any, result: Any) -> None:
        """The call has ended; `result` is None when it raised or was cut off."""

    def enter_item(self, site: Site) -> Any:
        """A generator or coroutine of this site resumes; it pauses at `leave`."""
        return self.enter(site, (), {})


@dataclass
class Instrumentation:
    """The state of one `instrument` block, complete once the block has ended."""

    sites: list[Site]
    aliases: dict[str, str] = field(default_factory=dict)
    unobservable: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    num_cut_off: int = 0


Lane = tuple[int, int]


def current_lane() -> Lane:
    """Where calls nest properly: a thread, and in it the asyncio task that runs now."""
    if asyncio._get_running_loop() is None:
        return threading.get_ident(), 0
    return threading.get_ident(), id(asyncio.current_task())


class _Stacks:
    """Open calls of every thread and task, so that whatever is still open can be unwound at the end."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._open: dict[Lane, list[tuple[Site, Any]]] = {}
        self.num_cut_off = 0
        self.is_closed = False

    def push(self, site: Site, token: Any) -> None:
        lane = current_lane()
        stack = self._open.get(lane)
        if stack is None:
            stack = self._open[lane] = []
        stack.append((site, token))

    def pop(self, site: Site, result: Any) -> None:
        """Close the innermost open call of `site`, and those inside it that never said goodbye."""
        lane = current_lane()
        stack = self._open.get(lane, [])
        if not any(open_site is site for open_site, _ in stack):
            return
        while stack:
            open_site, token = stack.pop()
            is_match = open_site is site
            self.num_cut_off += not is_match
            self.observer.leave(open_site, token, result if is_match else None)
            if is_match:
                break
        if not stack:
            # Tasks come and go, and their numbers are used again.
            self._open.pop(lane, None)

    def unwind(self) -> None:
        """`always_call` hooks do not fire on KeyboardInterrupt and SystemExit, so the block closes what is open."""
        self.is_closed = True
        for stack in list(self._open.values()):
            while stack:
                site, token = stack.pop()
                self.num_cut_off += 1
                self.observer.leave(site, token, None)


@contextmanager
def instrument(sites: Iterable[Site], observer: Observer) -> Iterator[Instrumentation]:
    """Observe every call of each site inside the block; nothing stays behind after it, also when it raises.

    A module object is hooked once, however many paths lead to it: further paths become `aliases`.
    """
    state = Instrumentation(sites=[])
    stacks = _Stacks(observer)
    undo: list[Callable[[], bool]] = []
    first_path: dict[tuple[int, str | None, str | None], str] = {}
    try:
        for site in sites:
            key = (id(site.owner), site.path if site.is_mark else site.method, site.phase)
            if key in first_path:
                state.aliases[site.path] = first_path[key]
                continue
            first_path[key] = site.path
            try:
                undo.append(_attach(site, stacks))
                state.sites.append(site)
            except (AttributeError, TypeError, RuntimeError) as error:
                state.unobservable[site.path] = str(error)
        yield state
    finally:
        for site, remove in reversed(list(zip(state.sites, undo, strict=False))):
            if not remove():
                state.lost.append(site.path)
        stacks.unwind()
        state.num_cut_off = stacks.num_cut_off


def _attach(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    """Start observing a site; returns what ends it, which tells whether the observation was still in place."""
    if site.is_mark:
        return _attach_mark(site, stacks)
    if site.phase is not None:
        return _attach_phase(site, stacks)
    if site.is_module:
        return _attach_module(site, stacks)
    if site.method == "__call__":
        return _attach_call(site, stacks)
    return _attach_method(site, stacks)


def _attach_module(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    module: nn.Module = site.owner

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stacks.push(site, stacks.observer.enter(site, args, kwargs))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        stacks.pop(site, result)
        return _observe_items(result, site, stacks) if _has_items(result) else None

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]

    def remove() -> bool:
        was_there = all(handle.id in (handle.hooks_dict_ref() or {}) for handle in handles)
        for handle in handles:
            handle.remove()
        return was_there

    return remove


def _attach_phase(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    """Observe those calls of a module that belong to one phase of its `generate`."""
    module: nn.Module = site.owner
    num_calls: dict[Lane, int] = {}
    generate: Callable[..., Any] = getattr(module, "generate")  # noqa: B009 (nn.Module declares no such method)

    @functools.wraps(generate)
    def counting(*args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        outer, num_calls[lane] = num_calls.get(lane), 0
        try:
            return generate(*args, **kwargs)
        finally:
            del num_calls[lane]
            if outer is not None:
                num_calls[lane] = outer

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lane = current_lane()
        index = num_calls.get(lane)
        if index is None:
            return
        num_calls[lane] = index + 1
        if (index == 0) == (site.phase == "prefill"):
            stacks.push(site, stacks.observer.enter(site, args, kwargs))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        stacks.pop(site, result)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    restore = _replace_attribute(site, "generate", counting)

    def remove() -> bool:
        was_there = all(handle.id in (handle.hooks_dict_ref() or {}) for handle in handles)
        for handle in handles:
            handle.remove()
        return restore() and was_there

    return remove


def _attach_method(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    """Put a wrapper with the same signature into the owner's own attributes."""
    name = site.method
    assert name is not None
    return _replace_attribute(site, name, _observed_function(getattr(site.owner, name), site, stacks))


def _replace_attribute(site: Site, name: str, observed: Any) -> Callable[[], bool]:
    """Set an attribute in the owner's own dictionary; returns what puts back what was there."""
    own: dict[str, Any] | None = getattr(site.owner, "__dict__", None)
    if not isinstance(own, dict):
        raise TypeError(f"{site.owner_type} has no attributes of its own (slots), so its methods cannot be observed")
    was_own, previous = name in own, own.get(name)
    own[name] = observed

    def remove() -> bool:
        was_there = own.get(name) is observed
        if was_there:
            if was_own:
                own[name] = previous
            else:
                del own[name]
        return was_there

    if getattr(site.owner, name) is not observed:
        remove()
        raise TypeError(f"{site.owner_type} makes {name!r} anew at each use (a property), so it cannot be observed")
    return remove


def _attach_call(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    """Observe calls of a plain object: Python looks `__call__` up on the class, so the object gets an own subclass."""
    owner, kind = site.owner, site.owner.__class__
    observed = _observed_function(owner.__call__, site, stacks)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return observed(*args, **kwargs) if self is owner else kind.__call__(self, *args, **kwargs)

    functools.update_wrapper(call, kind.__call__)
    names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": call}
    substitute = type(kind)(kind.__name__, (kind,), names)
    object.__setattr__(owner, "__class__", substitute)

    def remove() -> bool:
        was_there = type(owner) is substitute
        if was_there:
            object.__setattr__(owner, "__class__", kind)
        return was_there

    return remove


def _observed_function(original: Callable[..., Any], site: Site, stacks: _Stacks) -> Callable[..., Any]:
    """A function with the original's signature that tells of each call, and of none once the block has ended."""

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return _call_observed(original, args, kwargs, site, stacks)

    if not inspect.iscoroutinefunction(original):
        return observed

    @functools.wraps(original)
    async def observed_coroutine(*args: Any, **kwargs: Any) -> Any:
        return await observed(*args, **kwargs)

    return observed_coroutine


def _call_observed(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: Site, stacks: _Stacks
) -> Any:
    if stacks.is_closed:
        return original(*args, **kwargs)
    stacks.push(site, stacks.observer.enter(site, args, kwargs))
    result = None
    try:
        result = original(*args, **kwargs)
    finally:
        stacks.pop(site, result)
    return _observe_items(result, site, stacks) if _has_items(result) else result


def _has_items(result: Any) -> bool:
    return inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result)


def _observe_items(result: Any, site: Site, stacks: _Stacks) -> Any:
    """The work of a generator or coroutine happens when it is resumed: observe each resumption."""
    if inspect.isgenerator(result):
        return _observe_generator(result, site, stacks)
    if inspect.iscoroutine(result):
        return _await_observed(result, site, stacks)
    return _observe_async_generator(result, site, stacks)


def _resume(step: Callable[[], Any], site: Site, stacks: _Stacks) -> Any:
    if stacks.is_closed:
        return step()
    stacks.push(site, stacks.observer.enter_item(site))
    try:
        return step()
    finally:
        stacks.pop(site, None)


def _observe_generator(inner: Generator[Any, Any, Any], site: Site, stacks: _Stacks) -> Generator[Any, Any, Any]:
    """Drive a generator (or the generator side of an awaitable), one observed span for each resumption."""
    step: Callable[[], Any] = functools.partial(next, inner)
    try:
        while True:
            try:
                item = _resume(step, site, stacks)
            except StopIteration as stop:
                return stop.value
            try:
                sent = yield item
                step = functools.partial(inner.send, sent)
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(inner.throw, error)
    finally:
        inner.close()


class _Awaitable:
    """Awaits `inner` with each await-free part observed."""

    def __init__(self, inner: Any, site: Site, stacks: _Stacks) -> None:
        self._parts = _observe_generator(inner.__await__(), site, stacks)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._parts


async def _await_observed(coroutine: Any, site: Site, stacks: _Stacks) -> Any:
    return await _Awaitable(coroutine, site, stacks)


async def _observe_async_generator(
    inner: AsyncGenerator[Any, Any], site: Site, stacks: _Stacks
) -> AsyncGenerator[Any, Any]:
    step: Callable[[], Any] = inner.__anext__
    try:
        while True:
            try:
                item = await _Awaitable(step(), site, stacks)
            except StopAsyncIteration:
                return
            try:
                sent = yield item
                step = functools.partial(inner.asend, sent)
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(inner.athrow, error)
    finally:
        await inner.aclose()


class _Marks:
    """Who observes which marks. The tables are replaced, never changed, so that marks read them without a lock."""

    def __init__(self) -> None:
        self.watchers: dict[str, tuple[_Stacks, ...]] = {}
        self.sites: dict[str, Site] = {}
        self._lock = threading.Lock()

    def site(self, name: str) -> Site:
        """The one site of that name."""
        with self._lock:
            if name not in self.sites:
                self.sites = {**self.sites, name: Site(name, self)}
            return self.sites[name]

    def watch(self, name: str, stacks: _Stacks) -> None:
        """Let `stacks` observe the marks of that name, or with `_ANY` all marks."""
        with self._lock:
            self.watchers = {**self.watchers, name: (*self.watchers.get(name, ()), stacks)}

    def unwatch(self, name: str, stacks: _Stacks) -> None:
        """End what `watch` began."""
        with self._lock:
            left = tuple(other for other in self.watchers.get(name, ()) if other is not stacks)
            others = {key: value for key, value in self.watchers.items() if key != name}
            self.watchers = {**others, name: left} if left else others

    def watching(self, name: str) -> tuple[_Stacks, ...]:
        """Who observes the marks of that name now, each once."""
        named, everyone = self.watchers.get(name, ()), self.watchers.get(_ANY, ())
        return tuple(dict.fromkeys((*everyone, *named))) if named else everyone


_ANY = "*"
_MARKS = _Marks()


def mark_site(name: str) -> Site:
    """The site of the marks of one name, `@stage(name)` and `with stage(name)`, wherever they are."""
    return _MARKS.site(name)


def any_mark() -> Site:
    """Stands for every mark: its observer is told of each by that mark's own site."""
    return _MARKS.site(_ANY)


def known_marks() -> set[str]:
    """Names of the marks met so far: those of decorators, and those of blocks that ran under observation."""
    return set(_MARKS.sites) - {_ANY}


def call_marked(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a marked function, and tell those who observe its mark."""
    call, site = function, _MARKS.site(name)
    for stacks in _MARKS.watching(name):
        call = functools.partial(_call_marked_for, stacks, site, call)
    return call(*args, **kwargs)


def _call_marked_for(stacks: _Stacks, site: Site, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return _call_observed(call, args, kwargs, site, stacks)


def enter_mark(name: str) -> None:
    """A marked block begins."""
    site = _MARKS.site(name)
    for stacks in _MARKS.watching(name):
        stacks.push(site, stacks.observer.enter(site, (), {}))


def leave_mark(name: str) -> None:
    """The innermost marked block of that name on this thread or task ends; nothing if its begin was not observed."""
    site = _MARKS.site(name)
    for stacks in _MARKS.watching(name):
        if not stacks.is_closed:
            stacks.pop(site, None)


def is_any_mark_observed() -> bool:
    """Whether anybody observes marks now."""
    return bool(_MARKS.watchers)


def _attach_mark(site: Site, stacks: _Stacks) -> Callable[[], bool]:
    _MARKS.watch(site.path, stacks)

    def remove() -> bool:
        _MARKS.unwatch(site.path, stacks)
        return True

    return remove
