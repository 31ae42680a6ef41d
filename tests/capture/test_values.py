import dataclasses
import enum
import json
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfladder.capture.compare import Encoded, compare_tensors, compare_values
from perfladder.capture.decode import Decoder, not_rebuildable
from perfladder.capture.encode import Encoder
from perfladder.capture.nodes import Node, leaves
from perfladder.capture.types import CaptureType
from perfladder.errors import CaptureError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def round_trip(values, **types):
    """Encode, send the nodes through JSON as a file does, and rebuild."""
    types = {name: CaptureType(kind) for name, kind in types.items()}
    encoder = Encoder()
    nodes = encoder.encode(values)
    nodes = {
        name: Node.model_validate_json(node.model_dump_json(exclude_defaults=True)) for name, node in nodes.items()
    }
    return Decoder(encoder.blocks, encoder.storages, types=types).decode(nodes), encoder


def one(value, **types):
    decoded, encoder = round_trip({"x": value}, **types)
    assert encoder.unsupported == {}
    return decoded["x"]


def same(left, right):
    """Equal in type, value and, for tensors, layout and bits."""
    if isinstance(left, torch.Tensor):
        assert type(right) is torch.Tensor
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        if left.numel():
            assert left.stride() == right.stride()
        return compare_tensors(left.detach(), right.detach()) is None
    if isinstance(left, float) and math.isnan(left):
        return type(right) is float and math.isnan(right)
    if isinstance(left, complex):
        return repr(left) == repr(right)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape)) if shape else 1
    values = np.random.default_rng(draw(st.integers(0, 1000)))
    noise = values.integers(0, 2 if dtype is torch.bool else 256, count * element_bytes).tolist()
    tensor = torch.tensor(noise, dtype=torch.uint8).view(dtype).reshape(shape)
    match draw(st.sampled_from(["plain", "transposed", "sliced", "expanded", "strided"])):
        case "transposed" if tensor.dim() > 1:
            return tensor.transpose(0, -1)
        case "sliced" if tensor.dim() and tensor.shape[0]:
            return tensor[1:]
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *shape)
        case "strided" if tensor.dim():
            return tensor[..., ::2]
    return tensor


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text())
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(
        PLAIN, tensors(), st.sampled_from([torch.float16, torch.device("cpu"), torch.channels_last, torch.Size([2, 3])])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_nested_values_come_back_as_they_were(value):
    assert same(value, one(value))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters()))
def test_a_text_comes_back_or_is_refused(text):
    decoded, encoder = (
        round_trip({"x": [text]}) if not any("\ud800" <= c <= "\udfff" for c in text) else (None, Encoder())
    )
    if decoded is None:
        encoder.encode({"x": [text]})
        assert "surrogates" in encoder.unsupported["x.0"]
    else:
        assert decoded["x"] == [text]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_dimensional_and_empty_tensors(dtype):
    for tensor in (
        torch.ones((), dtype=torch.uint8).to(dtype),
        torch.empty(0, dtype=dtype),
        torch.empty(2, 0, 3, dtype=dtype),
    ):
        assert same(tensor, one(tensor))


def test_channels_last_stays_channels_last():
    image = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    assert one(image).is_contiguous(memory_format=torch.channels_last)


def test_expanded_tensor_takes_the_memory_of_its_one_row():
    decoded, encoder = round_trip({"x": torch.ones(1, 4).expand(1000, 4)})
    assert decoded["x"].stride() == (0, 1)
    assert encoder.num_bytes <= 16


def test_a_small_view_does_not_drag_its_whole_storage_along():
    _, encoder = round_trip({"x": torch.zeros(1 << 20)[5000:5004]})
    assert encoder.num_bytes <= 32


def test_sharing_is_restored():
    base = torch.arange(10.0)
    values, _ = round_trip({"args": (base, base[2:4]), "kwargs": {"same": base, "other": base.clone()}})
    whole, part, kwargs = *values["args"], values["kwargs"]
    whole[2] = 99
    assert part[0] == 99
    assert kwargs["same"][2] == 99
    assert kwargs["other"][2] == 2


def test_bytes_of_one_storage_in_two_dtypes_stay_shared():
    base = torch.zeros(4, dtype=torch.int32)
    (left, right), _ = round_trip({"x": (base, base.view(torch.int16))})[0]["x"], None
    left[0] = 1
    assert right[0] == 1


@pytest.mark.parametrize("tensor", [torch.ones(3)[::5], torch.ones(1).expand(1), torch.ones(4, 4)[:1, 2:3]])
def test_single_elements_with_odd_strides(tensor):
    assert same(tensor, one(tensor))


def test_each_decoding_makes_new_memory():
    encoder = Encoder()
    nodes = encoder.encode({"x": torch.zeros(2)})
    decoder = Decoder(encoder.blocks, encoder.storages)
    decoder.decode(nodes)["x"].add_(1)
    assert decoder.decode(nodes)["x"].tolist() == [0, 0]


def test_values_are_copied_when_they_are_encoded():
    encoder, tensor = Encoder(), torch.zeros(2)
    nodes = encoder.encode({"x": tensor})
    tensor.add_(1)
    assert Decoder(encoder.blocks, encoder.storages).decode(nodes)["x"].tolist() == [0, 0]


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda t: t.conj().imag, lambda t: t.real])
def test_conjugated_and_negated_views_keep_their_values(view):
    tensor = view(torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(one(tensor), tensor.resolve_conj().resolve_neg())


def test_parameters_come_back_as_tensors_that_want_gradients():
    parameter = torch.nn.Parameter(torch.ones(2))
    back = one(parameter)
    assert type(back) is torch.Tensor
    assert back.requires_grad
    assert back.is_leaf


def test_generator_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    back = one(generator)
    assert torch.equal(torch.rand(4, generator=back), torch.rand(4, generator=generator))


@pytest.mark.parametrize(
    "array", [np.array(5.0), np.arange(6)[::-2], np.zeros((0, 2)), np.array([True]), np.array([1j])]
)
def test_numpy_arrays_keep_shape_and_dtype(array):
    back = one(array)
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_read_only_array_comes_back():
    array = np.arange(3)
    array.flags.writeable = False
    assert one(array).tolist() == [0, 1, 2]


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.float64("nan"), np.int64(3), np.bool_(True)])
def test_numpy_scalars_stay_scalars(scalar):
    back = one(scalar)
    assert type(back) is type(scalar)
    np.testing.assert_equal(back, scalar)


Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    image: torch.Tensor
    size: int = 1


class Mode(enum.Enum):
    FAST = 1


def qualified(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


@pytest.mark.parametrize("value", [Point(1, 2.0), Batch(torch.ones(2), 3), Mode.FAST])
def test_registered_records_are_rebuilt_and_others_are_not(value):
    back = one(value, **{qualified(type(value)): type(value)})
    assert type(back) is type(value)
    encoder = Encoder()
    nodes = encoder.encode({"args": (value,)})
    with pytest.raises(CaptureError, match=r"args.0 is a .*not among the classes"):
        Decoder(encoder.blocks, encoder.storages).decode(nodes)
    assert list(not_rebuildable(nodes, {})) == ["args.0"]


@dataclasses.dataclass
class Output(dict):
    """As models' outputs are: the mapping leaves out the fields that are None."""

    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


def test_field_that_a_mapping_leaves_out_is_none():
    back = one(Output(logits=torch.ones(2)), **{qualified(Output): Output})
    assert (list(back), back.loss) == (["logits"], None)


class Wrapper(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "a builtins.object cannot be stored"),
        (iter([]), "a builtins.list_iterator cannot be stored"),
        (torch.ones(2).as_subclass(Wrapper), "a tensor subclass"),
        (torch.ones(2, 2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), "tensor on meta cannot be stored"),
        ({(1, 2): 3}, "a builtins.dict cannot be stored"),
        ({float("nan"): 3}, "a builtins.dict cannot be stored"),
        (np.array(["text"]), "a numpy ndarray"),
        (np.array([object()]), "a numpy ndarray"),
        (np.longdouble(1), "a numpy longdouble"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_cannot_be_stored_is_named_by_its_path(value, reason):
    encoder = Encoder()
    nodes = encoder.encode({"kwargs": {"inner": [1, value]}})
    assert reason in encoder.unsupported["kwargs.inner.1"]
    with pytest.raises(CaptureError, match=r"inner|kwargs"):
        Decoder(encoder.blocks, encoder.storages).decode(nodes)


def test_value_that_holds_itself_is_named_instead_of_recursing():
    endless: list = []
    endless.append(endless)
    encoder = Encoder()
    encoder.encode({"x": endless})
    assert encoder.unsupported == {"x.0": "it holds itself"}


def test_deep_nesting_is_named_instead_of_recursing():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    encoder = Encoder()
    encoder.encode({"x": deep})
    assert "nested deeper than" in next(iter(encoder.unsupported.values()))


def test_keys_that_read_the_same_are_leaves_of_their_own():
    node = Encoder().encode({"x": {1: "a", "1": "b", "n": {"m": 1}, "n.m": 2}})["x"]
    assert len(leaves(node, "x")) == 4


# What a damaged or hostile manifest may say


@pytest.mark.parametrize(
    "change",
    [
        {"size": [1000]},
        {"offset": -1},
        {"offset": 1 << 40},
        {"stride": [1 << 40]},
        {"stride": [-1]},
        {"size": [-4]},
        {"size": [2, 2]},
        {"storage": 7},
        {"storage": -1},
        {"dtype": "load"},
        {"dtype": "hub"},
        {"device": "moon"},
    ],
    ids=str,
)
def test_tensor_that_reaches_outside_its_storage_is_refused(change):
    encoder = Encoder()
    node = encoder.encode({"x": torch.zeros(4)})["x"]
    damaged = json.loads(node.model_dump_json())
    damaged["tensor"].update(change)
    with pytest.raises(CaptureError, match="x is damaged"):
        Decoder(encoder.blocks, encoder.storages).decode({"x": Node.model_validate(damaged)})


@pytest.mark.parametrize(
    "node",
    [
        {"kind": "torch", "type_name": "dtype", "value": "hub"},
        {"kind": "torch", "type_name": "module", "value": "hub"},
        {"kind": "torch", "type_name": "builtin_function_or_method", "value": "load"},
        {"kind": "dict", "keys": ["a"], "items": []},
        {"kind": "tensor"},
        {"kind": "array", "items": []},
        {"kind": "generator", "value": "cpu", "items": [{"kind": "plain", "value": 1}]},
        {"kind": "float", "value": "x"},
    ],
    ids=str,
)
def test_node_that_makes_no_sense_is_refused(node):
    with pytest.raises(CaptureError):
        Decoder([]).decode({"x": Node.model_validate(node)})


# Comparison


def compare(left, right):
    one_side, other_side = Encoder(), Encoder()
    return compare_values(
        Encoded(one_side.encode({"v": left}), one_side.blocks, one_side.storages),
        Encoded(other_side.encode({"v": right}), other_side.blocks, other_side.storages),
    )


def test_equal_values_have_no_difference():
    value = {"a": torch.tensor([1.0, float("nan")]), "b": [1, "x", float("inf")], "c": torch.Generator().manual_seed(1)}
    assert compare(value, value) == {}


@pytest.mark.parametrize(
    ("left", "right", "path", "reason"),
    [
        ([1], [2], "v.0", "1 became 2"),
        ([1], [1.0], "v.0", "became"),
        ([1], [1, 2], "v.1", "is there only after"),
        ({"a": 1}, {}, "v.a", "is there only before"),
        (torch.zeros(2), torch.zeros(3), "v", r"float32 \[2\] became float32 \[3\]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "v", "float32 .* became float64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "v", "1 of 2 values differ"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "v", "NaN or infinite on one side only"),
        (torch.zeros(1), [0], "v", "is there only|became"),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), "v", "values differ"),
    ],
)
def test_difference_is_named_by_path_and_reason(left, right, path, reason):
    import re

    differences = compare(left, right)
    assert re.search(reason, differences[path].reason)
    assert not differences[path].is_within_tolerance


def test_error_is_relative_to_the_largest_value_and_judged_by_dtype():
    difference = compare_tensors(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 1.0005]))
    assert difference is not None
    assert difference.max_abs_error == pytest.approx(5e-4, rel=1e-2)
    assert difference.max_rel_error == pytest.approx(5e-6, rel=1e-2)
    assert difference.is_within_tolerance
    worse = compare_tensors(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 1.005]))
    assert worse is not None
    assert not worse.is_within_tolerance


def test_nan_and_infinity_on_both_sides_are_no_error():
    nan, inf = float("nan"), float("inf")
    difference = compare_tensors(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.0 + 1e-6]))
    assert difference is not None
    assert difference.is_within_tolerance
    assert math.isfinite(difference.max_abs_error)


def test_errors_are_always_finite_so_that_a_result_can_be_read_back():
    difference = compare_tensors(torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, 2.0]))
    assert difference is not None
    assert (difference.max_abs_error, difference.is_within_tolerance) == (1.0, False)


def test_signed_zero_is_a_difference_of_bits_within_tolerance():
    difference = compare_tensors(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert difference is not None
    assert difference.is_within_tolerance


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bfloat16])
def test_unusual_dtypes_can_be_compared(dtype):
    left, right = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype)
    difference = compare_tensors(left, right)
    assert difference is not None
    assert difference.max_abs_error == 2.0
