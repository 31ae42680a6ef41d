"""The sizes that a TensorRT engine is built for: stated by the user, or those of a graph or of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from perfladder.errors import InputError
from perfladder.models import Model
from perfladder.text import near_names
from perfladder.tuning.dims import SemanticPath

if TYPE_CHECKING:
    from perfladder.tuning.graphs import GraphSpec
    from perfladder.tuning.samples import Sample
    from perfladder.tuning.specs import TensorSpec

Sizes = tuple[int, ...]
Shapes = tuple[Sizes, ...]


class ProfileShape(Model):
    """Least, preferred and largest shape of one tensor."""

    path: SemanticPath
    min: Sizes
    opt: Sizes
    max: Sizes


class TensorRTProfile(Model):
    """Sizes that one profile of an engine is built for, by input; inputs of fixed sizes may be left out."""

    shapes: list[ProfileShape] = []

    def add_input_shape(
        self, path: SemanticPath, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> TensorRTProfile:
        """Add the sizes of one input, and return this profile.

        Args:
            path: A parameter's name, or the path to a tensor inside one, such as `("options", "mask")`.
            min: Least shape.
            opt: Shape to choose kernels for.
            max: Largest shape.

        Raises:
            InputError: The shapes have other forms, are in no order, or the input was added before.
        """
        where = f"TensorRTProfile: {path!r}"
        shapes = [_sizes(f"{where}: {name}", shape) for name, shape in (("min", min), ("opt", opt), ("max", max))]
        if len({len(shape) for shape in shapes}) > 1:
            raise InputError(
                f"{where}: min, opt and max have {[len(shape) for shape in shapes]} sizes; give equal ranks."
            )
        for axis, sizes in enumerate(zip(*shapes, strict=True)):
            if list(sizes) != sorted(sizes):
                raise InputError(f"{where}: axis {axis} has {list(sizes)}; expected min <= opt <= max.")
        if any(one.path == path for one in self.shapes):
            raise InputError(f"{where} was added before; another range of it goes into another profile.")
        self.shapes.append(ProfileShape(path=path, min=shapes[0], opt=shapes[1], max=shapes[2]))
        return self


def _sizes(where: str, shape: Any) -> Sizes:
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
    if sizes is None or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise InputError(f"{where}: expected all sizes as whole numbers, such as (1, 3, 64, 64), got {shape!r}.")
    return sizes


class InputRange(Model):
    """Sizes of one input in one profile."""

    name: str = Field(description="in the engine")
    access_path: str
    min: Sizes
    opt: Sizes
    max: Sizes

    def covers(self, shape: Sizes) -> bool:
        """Whether a shape lies in the range."""
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )


class Profile(Model):
    """One profile of an engine; inputs in the order in which a build takes them."""

    inputs: list[InputRange]

    def covers(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes lies in the profile."""
        return all(one.covers(shape) for one, shape in zip(self.inputs, shapes, strict=True))

    def distance(self, shapes: Shapes) -> int:
        """How far a call is from what kernels were chosen for."""
        return sum(
            abs(size - best)
            for one, shape in zip(self.inputs, shapes, strict=True)
            for size, best in zip(shape, one.opt, strict=True)
        )


Asked = Literal["single", "samples_used"] | list[TensorRTProfile]


def profiles_of(
    asked: Asked, graph: GraphSpec, samples: Sequence[Sample], names: Callable[[int], str]
) -> list[Profile]:
    """The profiles to build.

    Args:
        asked: `single`: one with the graph's ranges; `samples_used`: one for each set of shapes that samples have; or
            the user's own.
        graph: Its ranges are those that the user stated, or else those that were seen.
        samples: Recorded calls.
        names: The name of an input in the engine, by its position.

    Raises:
        InputError: The user's own do not fit the graph.
    """
    if asked == "single":
        return [_profile(graph, names, lambda spec: (spec.min_shape, spec.opt_shape, spec.max_shape))]
    if asked == "samples_used":
        return _of_samples(graph, samples, names)
    if any(spec_is_stated(graph, spec) for spec in graph.inputs):
        raise InputError("profiles: the module has `dynamic_shapes` too, and both state ranges; leave one of them out.")
    if not asked:
        raise InputError("profiles: the list is empty; leave it out for one profile of all sizes.")
    return [_of_user(profile, graph, names) for profile in asked]


def spec_is_stated(graph: GraphSpec, spec: TensorSpec) -> bool:
    """Whether the user stated the sizes of an input by `dynamic_shapes`."""
    return any(one.path == spec.semantic_path for one in graph.to_model().stated)


def _profile(
    graph: GraphSpec, names: Callable[[int], str], ranges: Callable[[TensorSpec], tuple[Sizes, Sizes, Sizes]]
) -> Profile:
    inputs = []
    for number, spec in enumerate(graph.inputs):
        least, best, largest = ranges(spec)
        inputs.append(InputRange(name=names(number), access_path=spec.access_path, min=least, opt=best, max=largest))
    return Profile(inputs=inputs)


def _of_samples(graph: GraphSpec, samples: Sequence[Sample], names: Callable[[int], str]) -> list[Profile]:
    from perfladder.tuning.tree import bind, input_leaves

    sets: dict[Shapes, Profile] = {}
    for sample in samples:
        leaves = {leaf.path: leaf.value for leaf in input_leaves(bind(graph.parameters, sample.args, sample.kwargs))}
        shapes = {spec.path: tuple(leaves[spec.path].shape) for spec in graph.inputs}
        key = tuple(shapes.values())
        if key not in sets:
            sets[key] = _profile(graph, names, lambda spec, seen=shapes: (seen[spec.path],) * 3)  # type: ignore[misc]
    return list(sets.values())


def _of_user(profile: TensorRTProfile, graph: GraphSpec, names: Callable[[int], str]) -> Profile:
    stated: dict[SemanticPath, ProfileShape] = {one.path: one for one in profile.shapes}
    known = {spec.semantic_path: spec for spec in graph.inputs}
    for path in stated:
        if path not in known:
            listed = [name if isinstance(name, str) else repr(name) for name in known]
            raise InputError(
                f"profiles: no call has a tensor at {path!r}. {near_names(str(path), listed, 'paths of tensors')}"
            )
    return _profile(graph, names, lambda spec: _fitting(spec, stated.get(spec.semantic_path)))


def _fitting(spec: TensorSpec, stated: ProfileShape | None) -> tuple[Sizes, Sizes, Sizes]:
    if stated is None:
        if spec.dynamic_axes:
            raise InputError(
                f"profiles: `{spec.access_path}` is missing, whose axes {spec.dynamic_axes} change between calls; add "
                "it with add_input_shape."
            )
        return spec.min_shape, spec.opt_shape, spec.max_shape
    if len(stated.min) != len(spec.shape):
        raise InputError(
            f"profiles: `{spec.access_path}` has {len(stated.min)} sizes, but the tensor has {len(spec.shape)}: "
            f"{list(spec.shape)}."
        )
    for axis, size in enumerate(spec.shape):
        if isinstance(size, int) and {stated.min[axis], stated.max[axis]} != {size}:
            raise InputError(
                f"profiles: `{spec.access_path}` axis {axis} has {stated.min[axis]}..{stated.max[axis]}, but all calls "
                f"had {size}; record calls of other sizes too, or give {size} alone."
            )
    return stated.min, stated.opt, stated.max


def chosen_profile(profiles: Sequence[Profile], shapes: Shapes) -> int:
    """Which profile serves a call: of those that cover it the one whose preferred sizes are nearest.

    Raises:
        InputError: None does; the first input that is outside all of them is named.
    """
    fitting = [number for number, profile in enumerate(profiles) if profile.covers(shapes)]
    if fitting:
        return min(fitting, key=lambda number: profiles[number].distance(shapes))
    for position, shape in enumerate(shapes):
        ranges = [profile.inputs[position] for profile in profiles]
        if not any(one.covers(shape) for one in ranges):
            listed = ", ".join(dict.fromkeys(f"{list(one.min)}..{list(one.max)}" for one in ranges))
            raise InputError(
                f"`{ranges[0].access_path}` has shape {list(shape)}, and the engine was built for {listed}. "
                "Next: tune with calls or `profiles` of this size."
            )
    told = ", ".join(
        f"`{one.access_path}` {list(shape)}" for one, shape in zip(profiles[0].inputs, shapes, strict=True)
    )
    raise InputError(
        f"no profile of the engine has {told} together. Next: tune with calls or `profiles` of these sizes."
    )


def check_read_back(asked: Sequence[Profile], found: Sequence[Mapping[str, tuple[Sizes, Sizes, Sizes]]]) -> str | None:
    """How the ranges of an engine differ from those that were asked for; None if they do not."""
    if len(asked) != len(found):
        return f"it has {len(found)} profiles, and {len(asked)} were asked for"
    for number, (profile, ranges) in enumerate(zip(asked, found, strict=True)):
        by_name = {one.name: one for one in profile.inputs}
        for name, got in ranges.items():
            wanted = (by_name[name].min, by_name[name].opt, by_name[name].max)
            if got != wanted:
                return (
                    f"profile {number} has {[list(sizes) for sizes in got]} for `{by_name[name].access_path}`, and "
                    f"{[list(sizes) for sizes in wanted]} was asked for"
                )
    return None
