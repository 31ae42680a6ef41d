"""Calls of one form have one key, and calls of two forms have two."""

import collections
import dataclasses
import enum
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfladder.tuning.graphs import GraphTable
from perfladder.tuning.keys import call_key
from perfladder.tuning.tree import map_tensors, register_input_type

Pair = collections.namedtuple("Pair", ["a", "b"])
Other = collections.namedtuple("Other", ["a", "b"])


@dataclasses.dataclass
class Request:
    image: object
    scale: object = 1.0


class Level(enum.IntEnum):
    ONE = 1


class Opaque:
    __hash__ = None


def key(*args, strict=True, **kwargs):
    found = call_key(args, kwargs, strict)
    hash(found)
    return found


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# Forms that must all be told apart, though many are equal to Python or made of the same pieces.
DIFFERENT = [
    (ones(1, 2),),
    (ones(2, 1),),
    (ones(1, 2, 1),),
    (ones(1, 2, dtype=torch.float64),),
    (ones(1, 2, dtype=torch.int64),),
    (ones(1, 2), ones(1, 2)),
    ([ones(1, 2)],),
    ((ones(1, 2),),),
    ([ones(1, 2), ones(1, 2)],),
    ([[ones(1, 2)], ones(1, 2)],),
    ([[ones(1, 2), ones(1, 2)]],),
    ({"a": ones(1, 2)},),
    ({"b": ones(1, 2)},),
    (collections.OrderedDict(a=ones(1, 2)),),
    (collections.UserDict(a=ones(1, 2)),),
    (Request(ones(1, 2)),),
    (Request(ones(1, 2), 1),),
    (Request(ones(1, 2), True),),
    (Pair(ones(1, 2), 1),),
    (Other(ones(1, 2), 1),),
    ((ones(1, 2), 1),),
    (True,),
    (1,),
    (1.0,),
    (1 + 0j,),
    ("1",),
    (b"1",),
    (Level.ONE,),
    (None,),
    ("None",),
    (0,),
    (0.0,),
    (-0.0,),
    (False,),
    ("0.0",),
    (float("nan"),),
    (float("inf"),),
    ([],),
    ((),),
    ({},),
    (),
    ([1, 2],),
    ([1], 2),
    ([[1], 2],),
    ({1: 2},),
    ({True: 2},),
    ({1.0: 2},),
    ({"1": 2},),
    ({(1,): 2},),
    ({(True,): 2},),
    (slice(1, 2),),
    (range(1, 2),),
    (torch.float32,),
    (torch.float64,),
    (torch.device("cpu"),),
    (torch.device("meta"),),
    (torch.Size([1]),),
    (...,),
    (Opaque(),),
    (collections.deque([1]),),
]


def test_no_two_forms_have_one_key():
    keys = [key(*args) for args in DIFFERENT]
    same = [(DIFFERENT[a], DIFFERENT[b]) for a, b in itertools.combinations(range(len(keys)), 2) if keys[a] == keys[b]]
    assert same == []


@pytest.mark.parametrize("args", DIFFERENT, ids=[str(index) for index in range(len(DIFFERENT))])
def test_a_call_made_again_has_its_key(args):
    assert key(*args) == key(*map_tensors(args, torch.clone))


def test_values_do_not_count_but_classes_do_where_not_strict():
    assert key(1, "a", strict=False) == key(2, "b", strict=False)
    assert key(float("nan"), strict=False) == key(0.0, strict=False)
    assert key([1], strict=False) != key([True], strict=False)
    assert key(torch.float16, strict=False) == key(torch.float32, strict=False)
    assert key([1], strict=False) != key([1, 1], strict=False)
    assert key(ones(1), strict=False) != key(ones(2), strict=False)


def test_nan_is_found_again():
    cache = {key(float("nan"), {"a": [float("nan")]}): 1}
    assert key(float("nan"), {"a": [float("nan")]}) in cache


def test_keywords_count_by_name():
    x = ones(1)
    assert key(x=x) != key(y=x)
    assert key(x=x) != key(x)
    assert key(x=x, y=1) == key(x=x, y=1)


def test_parameters_of_modules_are_tensors_and_other_subclasses_are_told_apart():
    class Tagged(torch.Tensor):
        pass

    assert key(nn.Parameter(ones(1))) == key(ones(1))
    assert key(ones(1).as_subclass(Tagged)) != key(ones(1))


def test_objects_that_nobody_registered_count_by_class():
    assert key(Opaque()) == key(Opaque())
    assert key(Opaque()) != key(object())
    assert key({1, 2}) == key({3})


def test_registered_objects_count_by_what_is_inside():
    class Box:
        def __init__(self, inside):
            self.inside = inside

    before = key(Box(ones(1)))
    assert before == key(Box(ones(2)))
    register_input_type(Box, lambda box: {"inside": box.inside}, lambda parts: Box(**parts))
    assert key(Box(ones(1))) == key(Box(ones(1)))
    assert len({before, key(Box(ones(1))), key(Box(ones(2))), key(Box(ones(1, 1))), key(Box(3)), key(Box([]))}) == 6


def test_a_cache_counts_by_its_tensors():
    from transformers import DynamicCache

    def filled(length, layers=2):
        cache = DynamicCache()
        for layer in range(layers):
            cache.update(ones(1, 2, length, 4), ones(1, 2, length, 4), layer)
        return cache

    assert key(filled(3)) == key(filled(3))
    assert len({key(filled(3)), key(filled(4)), key(filled(3, layers=1)), key(DynamicCache())}) == 4


DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool]
TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from(DTYPES),
)
SETTINGS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(Opaque()))
VALUES = st.recursive(
    st.one_of(TENSORS, SETTINGS),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), parts, max_size=3),
        st.builds(Request, parts, parts),
        st.builds(Pair, parts, parts),
    ),
    max_leaves=8,
)
CALLS = st.tuples(
    st.lists(VALUES, max_size=2).map(tuple), st.dictionaries(st.sampled_from(["k", "l", "m"]), VALUES, max_size=2)
)


@settings(max_examples=80, deadline=None)
@given(call=CALLS, strict=st.booleans())
def test_any_call_made_again_has_its_key_and_its_graph(call, strict):
    args, kwargs = call
    table = GraphTable(("x", "y"), strict=strict, limit=2)
    graph = table.observe(args, kwargs, 1)
    again_args, again_kwargs = map_tensors((args, kwargs), torch.clone)
    assert key(*args, strict=strict, **kwargs) == key(*again_args, strict=strict, **again_kwargs)
    assert table.find(again_args, again_kwargs) is graph
    assert table.find(again_args, dict(reversed(again_kwargs.items()))) is graph
    assert table.observe((), dict(zip(("x", "y"), again_args, strict=False)) | again_kwargs, 1) is graph


@settings(max_examples=60, deadline=None)
@given(call=CALLS, tensor=TENSORS, change=st.sampled_from(["rank", "dtype", "size"]), strict=st.booleans())
def test_any_call_with_another_tensor_has_another_key(call, tensor, change, strict):
    args, kwargs = call
    if change == "rank":
        changed = tensor[None]
    elif change == "dtype":
        changed = tensor.to(torch.float64)
    else:
        changed = torch.cat([tensor.reshape(-1)] * 2)
        tensor = tensor.reshape(-1)
    table = GraphTable(("x",), strict=strict, limit=2)
    first, second = ([{"t": tensor}, *args], [{"t": changed}, *args])
    graph = table.observe((first,), kwargs, 1)
    assert key(first, strict=strict, **kwargs) != key(second, strict=strict, **kwargs)
    assert table.find((second,), kwargs) is None
    assert '`x[0]["t"]`' in table.why_unseen((second,), kwargs)
    assert (table.observe((second,), kwargs, 1) is graph) == (change == "size")
