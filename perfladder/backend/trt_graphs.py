"""Which sizes of calls keep something costly, such as a CUDA graph, where not all can."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, Literal, TypeVar

Kept = TypeVar("Kept")
Policy = Literal["lfu", "lru"]

_MAX_COUNTED: Final = 1024
"""Sizes whose calls are counted; more of them are begun anew."""


class BoundedCache(Generic[Kept]):
    """At most so many values, by key; not thread-safe.

    Args:
        limit: 0 keeps nothing.
        policy: Who makes room: with `lfu` the one with the fewest calls, but only for one that has more; with `lru`
            the one whose last call is longest ago.
    """

    def __init__(self, limit: int, policy: Policy) -> None:
        self._limit, self._policy = limit, policy
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._calls: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable) -> Kept | None:
        """The value of a key, of which this is one more call."""
        if len(self._calls) >= _MAX_COUNTED and key not in self._calls:
            self._calls = Counter({one: self._calls[one] for one in self._kept})
        self._calls[key] += 1
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def wants(self, key: Hashable) -> bool:
        """Whether a value for a key would be kept: it was called before, and is worth the place of another one."""
        if not self._limit or self._calls[key] < 2:
            return False
        if len(self._kept) < self._limit or self._policy == "lru":
            return True
        return self._calls[key] > self._calls[self._victim()]

    def make_room(self) -> None:
        """Drop what has to go before one more value is made, so that both are never in memory together."""
        while self._kept and len(self._kept) >= self._limit:
            del self._kept[self._victim()]

    def put(self, key: Hashable, value: Kept) -> None:
        """Keep a value."""
        self.make_room()
        self._kept[key] = value

    def _victim(self) -> Hashable:
        if self._policy == "lru":
            return next(iter(self._kept))
        return min(self._kept, key=lambda key: self._calls[key])
