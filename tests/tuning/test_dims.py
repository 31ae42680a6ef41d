"""Dimensions and shapes that users state are checked before any call."""

import dataclasses

import pytest

from perfladder.errors import InputError
from perfladder.tuning.dims import BatchDim, DynamicDim, check_dynamic_shapes


@pytest.mark.parametrize("kind", [DynamicDim, BatchDim])
def test_the_preferred_size_is_the_largest_unless_given(kind):
    assert kind("n", 1, 8).opt == 8
    assert kind("n", min=1, opt=2, max=8).opt == 2
    assert kind("n", 1, 8) == kind("n", 1, 8, 8)
    assert hash(kind("n", 1, 8)) == hash(kind("n", 1, 8, 8))


def test_a_dimension_cannot_be_changed_and_kinds_differ():
    dim = DynamicDim("n", 1, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dim.min = 2
    assert dim != BatchDim("n", 1, 8)
    assert not isinstance(BatchDim("n", 1, 8), DynamicDim)


@pytest.mark.parametrize("kind", [DynamicDim, BatchDim])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("", 1, 8), "name: expected a text"),
        ((3, 1, 8), "name: expected a text"),
        (("n", 1.0, 8), "min: expected a whole number from 1 up, got 1.0"),
        (("n", True, 8), "min: expected a whole number from 1 up, got True"),
        (("n", 1, "8"), "max: expected a whole number"),
        (("n", 0, 8), "min: expected a whole number from 1 up, got 0"),
        (("n", 1, -8), "max: expected a whole number from 1 up, got -8"),
        (("n", 1, 8, False), "opt: expected a whole number from 1 up, got False"),
        (("n", 1, 8, 0), "opt: expected a whole number from 1 up, got 0"),
        (("n", 8, 8), "min has to be below max"),
        (("n", 9, 8), "min has to be below max"),
        (("n", 2, 8, 1), r"opt: 1 is outside 2\.\.8"),
        (("n", 2, 8, 9), r"opt: 9 is outside 2\.\.8"),
    ],
)
def test_a_wrong_dimension_is_named(kind, arguments, match):
    with pytest.raises(InputError, match=match) as error:
        kind(*arguments)
    assert kind.__name__ in str(error.value)


def test_shapes_by_name_and_by_path_are_kept():
    batch, side = BatchDim("batch", 1, 8), DynamicDim("side", 2, 4)
    shapes = {"x": (batch, 3, side, DynamicDim("side", 2, 4)), ("options", "mask"): (batch,), ("items", 0, "a"): ()}
    assert check_dynamic_shapes(shapes) == shapes
    assert check_dynamic_shapes(None) == {}


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ([("x", (1,))], "expected a mapping such as"),
        ({"": (1,)}, "'' is no input"),
        ({("x",): (1,)}, r"\('x',\) is no input"),
        ({(0, "x"): (1,)}, "is no input"),
        ({("x", 1.5): (1,)}, "is no input"),
        ({("x", True): (1,)}, "is no input"),
        ({3: (1,)}, "3 is no input"),
        ({"x": [1, 2]}, r"dynamic_shapes\['x'\]: expected a tuple of all sizes"),
        ({"x": BatchDim("b", 1, 2)}, "expected a tuple of all sizes"),
        ({"x": (1, "b")}, r"dynamic_shapes\['x'\]\[1\]: expected a size, a BatchDim or a DynamicDim, got 'b'"),
        ({"x": (True,)}, "got True"),
        ({"x": (-1,)}, "got -1"),
        ({"x": (None,)}, "got None"),
        ({"x": (DynamicDim("n", 1, 8),), "y": (DynamicDim("n", 1, 9),)}, "the dimension 'n' is"),
        ({"x": (DynamicDim("n", 1, 8), BatchDim("n", 1, 8))}, "the dimension 'n' is"),
        ({"x": (DynamicDim("n", 1, 8),), "y": (DynamicDim("n", 1, 8, 4),)}, "the dimension 'n' is"),
    ],
)
def test_a_wrong_shape_is_named(shapes, match):
    with pytest.raises(InputError, match=match):
        check_dynamic_shapes(shapes)
