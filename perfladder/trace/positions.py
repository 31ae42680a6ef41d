"""Module paths by their position in a repeated block: `blocks.0.attn` to `blocks.37.attn` are one, `blocks.*.attn`.

Numbered siblings are repeated if they are of one kind (by the caller's word, e.g. class and shapes of weights; without
it, the same places below them) and of like cost: the largest at most twice the smallest, by counted bytes where all
have some, else by time. So the stages of a U-Net, whose sizes differ, and the different layers of an `nn.Sequential`
stay apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ALL: Final = "*"
_LIKE_COST: Final = 2.0
_MAX_RANGES: Final = 4


@dataclass(frozen=True)
class Costs:
    """What each path costs by itself, without what is below it.

    Attributes:
        time_us: Of each path that is to have a position.
        num_bytes: Counted work of some of them.
        kinds: What makes two siblings the same, for some modules on the way.
    """

    time_us: Mapping[str, float]
    num_bytes: Mapping[str, float]
    kinds: Mapping[str, Hashable]


@dataclass(frozen=True)
class _Sibling:
    """One child of a position: a module's path for each module that the position stands for, and all paths below."""

    name: str
    roots: Sequence[str]
    members: Sequence[str]

    def kind(self, costs: Costs) -> Hashable:
        known = costs.kinds.get(self.roots[0])
        if known is not None:
            return known
        depth = self.roots[0].count(".") + 1
        return frozenset(tuple(path.split(".")[depth:]) for path in self.members)

    def bytes_each(self, costs: Costs) -> float:
        return sum(costs.num_bytes.get(path, 0.0) for path in self.members) / len(self.roots)

    def us_each(self, costs: Costs) -> float:
        return sum(costs.time_us[path] for path in self.members) / len(self.roots)


def find_positions(costs: Costs) -> dict[str, str]:
    """Return the position of each path of `costs.time_us`: the same path, with repeated numbers taken together.

    A number becomes `*` where all numbered siblings are repeated; where only some are, their numbers stand in brackets,
    as in `resnets.[1-2].conv1` beside `resnets.0.conv1`.
    """
    found: dict[str, str] = {}
    _descend("", list(costs.time_us), 0, costs, found)
    return found


def _descend(position: str, members: Sequence[str], depth: int, costs: Costs, found: dict[str, str]) -> None:
    """Give each member below a position its own; `depth` is the number of components that the position has."""
    children: dict[str, dict[str, list[str]]] = {}
    for path in members:
        parts = path.split(".")
        if len(parts) == depth:
            found[path] = position
        else:
            children.setdefault(parts[depth], {}).setdefault(".".join(parts[: depth + 1]), []).append(path)
    siblings = [
        _Sibling(name, list(roots), [path for paths in roots.values() for path in paths])
        for name, roots in children.items()
    ]
    numbered = sorted((one for one in siblings if one.name.isdecimal()), key=lambda one: int(one.name))
    groups = [[one] for one in siblings if not one.name.isdecimal()] + _group(numbered, costs)
    for group in groups:
        name = group[0].name
        if len(group) > 1:
            name = ALL if len(group) == len(numbered) else _brackets([int(one.name) for one in group])
        inside = [path for one in group for path in one.members]
        _descend(f"{position}.{name}" if depth else name, inside, depth + 1, costs, found)


def _group(numbered: Sequence[_Sibling], costs: Costs) -> list[list[_Sibling]]:
    """Return the siblings that repeat each other together, each group in order of its numbers."""
    by_kind: dict[Hashable, list[_Sibling]] = {}
    for one in numbered:
        by_kind.setdefault(one.kind(costs), []).append(one)
    groups: list[list[_Sibling]] = []
    for alike in by_kind.values():
        cost = {one.name: one.bytes_each(costs) for one in alike}
        if not all(cost.values()):
            cost = {one.name: one.us_each(costs) for one in alike}
        least = -1.0
        for one in sorted(alike, key=lambda one: cost[one.name]):
            if least < 0 or cost[one.name] > _LIKE_COST * least:
                groups.append([])
                least = cost[one.name]
            groups[-1].append(one)
    return [sorted(group, key=lambda one: int(one.name)) for group in groups]


def _brackets(numbers: Sequence[int]) -> str:
    """Return ascending numbers as in `[0-4,6]`; of many ranges the first and the last."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges]
    if len(texts) > _MAX_RANGES:
        texts = [*texts[: _MAX_RANGES - 1], "..", texts[-1]]
    return f"[{','.join(texts)}]"


def is_repeated(component: str) -> bool:
    """Whether a component of a position stands for several modules."""
    return component == ALL or component.startswith("[")
