"""Distinct inputs are kept once, with a count, as they were when the call was made."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perfladder.functional.names import describe_call
from perfladder.functional.samples import SampleStore, tensors_in

LINEAR, RELU, MATMUL = (describe_call(function) for function in (F.linear, F.relu, torch.Tensor.matmul))


def test_same_shapes_are_one_sample_that_keeps_the_first_tensors():
    store = SampleStore(None)
    store.take(RELU, (torch.zeros(2, 3),), {"inplace": False})
    store.take(RELU, (torch.ones(2, 3),), {"inplace": False})
    [(count, (args, kwargs))] = store.function_data()["relu"]
    assert (count, kwargs) == (2, {"inplace": False})
    assert args[0].tolist() == torch.zeros(2, 3).tolist()


@pytest.mark.parametrize(
    "other",
    [
        ((torch.zeros(3, 2),), {}),
        ((torch.zeros(2, 3, dtype=torch.float64),), {}),
        ((torch.zeros(3, 2).t(),), {}),
        ((torch.zeros(2, 3, device="meta"),), {}),
        ((torch.zeros(2, 3),), {"inplace": True}),
        ((torch.zeros(2, 3), 1), {}),
        ((torch.zeros(2, 3), True), {}),
        ((torch.zeros(2, 3), [1.0, slice(0, 2)]), {}),
        (([torch.zeros(2, 3)],), {}),
    ],
    ids=["shape", "dtype", "strides", "device", "keyword", "integer", "flag", "list", "nesting"],
)
def test_anything_else_is_another_sample(other):
    store = SampleStore(None)
    store.take(RELU, (torch.zeros(2, 3),), {})
    store.take(RELU, *other)
    store.take(RELU, *other)
    assert [count for count, _ in store.function_data()["relu"]] == [1, 2]


def test_later_changes_do_not_reach_the_sample():
    store, x = SampleStore(None), torch.tensor([-1.0, 1.0])
    store.take(RELU, (x,), {"inplace": True})
    x.relu_()
    [(_, (args, _))] = store.function_data()["relu"]
    assert args[0].tolist() == [-1.0, 1.0]


def test_views_keep_their_strides_and_share_memory_once():
    store, packed = SampleStore(None), torch.arange(24.0).reshape(2, 12)
    q, k = packed[:, :4], packed[:, 4:8]
    wide = torch.ones(1).expand(1000, 1000)
    store.take(LINEAR, (q, k), {"bias": wide})
    [(_, (args, kwargs))] = store.function_data()["linear"]
    assert [tensor.stride() for tensor in args] == [q.stride(), k.stride()]
    assert all(torch.equal(*pair) for pair in zip(args, (q, k), strict=True))
    assert args[0].untyped_storage().data_ptr() == args[1].untyped_storage().data_ptr()
    assert kwargs["bias"].stride() == (0, 0)
    assert store.num_bytes == (12 + 8) * 4 + 4


def test_parameters_are_kept_as_they_are():
    store, weight = SampleStore(None), nn.Parameter(torch.ones(2, 2))
    store.take(LINEAR, (torch.ones(1, 2), weight), {})
    [(_, (args, _))] = store.function_data()["linear"]
    assert args[1] is weight
    assert store.num_bytes == 8


@pytest.mark.parametrize(
    "value", [torch.zeros(0, 3), torch.tensor(1 + 2j).conj(), torch.eye(2).to_sparse(), torch.tensor(3)]
)
def test_unusual_tensors_are_kept(value):
    store = SampleStore(None)
    store.take(RELU, (value,), {})
    [(_, (args, _))] = store.function_data()["relu"]
    assert args[0].shape == value.shape
    assert args[0] is not value


def test_names_choose_and_none_means_functional_calls():
    everything, matmul = SampleStore(None), SampleStore(frozenset({"Tensor.matmul"}))
    for store in (everything, matmul):
        store.take(MATMUL, (torch.ones(1, 1), torch.ones(1, 1)), {})
        store.take(RELU, (torch.ones(1),), {})
    assert set(everything.function_data()) == {"relu"}
    assert set(matmul.function_data()) == {"Tensor.matmul"}


def test_budget_leaves_out_and_says_so():
    store = SampleStore(None, budget_bytes=100)
    store.take(RELU, (torch.zeros(25),), {})
    for _ in range(3):
        store.take(RELU, (torch.zeros(26),), {})
    assert [count for count, _ in store.function_data()["relu"]] == [1]
    left_out = store.left_out()["relu"]
    assert (left_out.num_samples, left_out.num_calls) == (1, 3)
    assert "100 bytes" in left_out.reason


def test_failing_copy_is_left_out(tmp_path):
    store = SampleStore(None, place=tmp_path / "gone")
    store.take(RELU, (torch.zeros(2),), {})
    assert store.function_data() == {"relu": []}
    assert "FileNotFoundError" in store.left_out()["relu"].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_files_hold_samples_and_leave_nothing(tmp_path, dtype):
    store, x = SampleStore(None, place=tmp_path), torch.arange(6).reshape(2, 3).to(dtype)
    store.take(RELU, (x.t(), nn.Parameter(torch.ones(2))), {})
    [(_, (args, _))] = store.function_data()["relu"]
    assert torch.equal(args[0], x.t())
    assert args[0].stride() == x.t().stride()
    assert args[1].device.type == "cpu"
    args[0].zero_()
    assert list(tmp_path.iterdir()) == []


def test_nothing_refers_to_the_programs_tensors():
    store, x = SampleStore(None), torch.ones(3)
    store.take(RELU, (x,), {})
    alive = weakref.ref(x)
    del x
    assert alive() is None
    assert len(tensors_in(store.function_data()["relu"][0][1])) == 1
