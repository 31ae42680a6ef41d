"""Classes by name: those here, those that users register, and those of installed packages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from perfladder.errors import InputError
from perfladder.text import near_names

T = TypeVar("T")


class Registry(Generic[T]):
    """What can be saved by its name, and is looked up by it again; a file never names code that is imported.

    Args:
        kind: The base class.
        own: perfladder's own, as `module:class` by name; imported when first asked for.
        group: Group of entry points of installed packages.
        noun: What one is called, as in "backend".
        base: Its public name, as in "pl.backend.Backend".
        register: Public name of the function that registers one.
    """

    def __init__(
        self, kind: type[T], own: Mapping[str, str], *, group: str, noun: str, base: str, register: str
    ) -> None:
        self._kind, self._own, self._group = kind, own, group
        self._noun, self._base, self._register = noun, base, register
        self._registered: dict[str, type[T]] = {}

    def register(self, kind: type[T]) -> type[T]:
        """Make a class known by its `name`; usable as a decorator.

        Raises:
            InputError: It is none of this kind, has no name, or the name belongs to another one.
        """
        function = self._register.rpartition(".")[2]
        if not (isinstance(kind, type) and issubclass(kind, self._kind)):
            raise InputError(f"{function}: expected a subclass of {self._base}, got {kind!r}.")
        name = getattr(kind, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(f"{function}: {kind.__name__} has no name; set the class attribute `name`.")
        known = self._registered.get(name)
        is_same = known is not None and (known.__module__, known.__qualname__) == (kind.__module__, kind.__qualname__)
        if name in self._own or (known is not None and not is_same):
            raise InputError(f"{function}: the name {name!r} belongs to another {self._noun}.")
        self._registered[name] = kind
        return kind

    def find(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            InputError: There is none; near names are told.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            found: type[T] = getattr(importlib.import_module(module), attribute)
            return found
        installed = {entry.name: entry for entry in entry_points(group=self._group)}
        if name in installed:
            return self.register(installed[name].load())
        known = [*self._own, *self._registered, *installed]
        raise InputError(
            f"There is no {self._noun} {name!r}. {near_names(name, known, f'{self._noun}s')} One of your own is made "
            f"known by {self._register}, before it is used."
        )
