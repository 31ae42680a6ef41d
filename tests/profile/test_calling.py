from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.errors import InputError, RungError


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        ({"a": 1, "b": 2}, (), {"a": 1, "b": 2}),
        ((1, 2), (1, 2), {}),
        (None, (), {}),
        (5, (5,), {}),
        ([1, 2], ([1, 2],), {}),
    ],
)
def test_input_becomes_arguments(given, args, kwargs, profile):
    seen = []
    result = profile(
        nn.Linear(2, 2), given, inference_function=lambda *a, **k: seen.append((a, k)) or torch.ones(1) + 1
    )
    assert set(map(repr, seen)) == {repr((args, kwargs))}
    assert result.data["input"] == {"args_count": len(args), "kwargs": list(kwargs)}


def test_a_named_tuple_is_one_argument(profile):
    point = namedtuple("point", "x y")(1, 2)
    seen = []
    profile(nn.Linear(2, 2), point, inference_function=lambda *a: seen.append(a) or torch.ones(1) + 1)
    assert seen[0] == (point,)


@pytest.mark.parametrize("warmup_runs", [0, 2])
def test_number_of_runs_includes_one_hidden_warmup(warmup_runs, pipe, x, profile):
    result = profile(pipe, x, warmup_runs=warmup_runs, measured_runs=3)
    assert pipe.num_calls == warmup_runs + 1 + 3
    assert [run["run_index"] for run in result.data["runs"]] == [0, 1, 2]
    assert len(result.data["summary"]["unprofiled"]["wall_time_us"]) == warmup_runs


def test_all_runs_are_without_gradients(pipe, x, profile):
    profile(pipe, x)
    assert pipe.grad_modes == {False}
    assert torch.is_grad_enabled()


def test_the_counts_are_checked(pipe, x):
    with pytest.raises(ValueError, match="warmup_runs"):
        pl.profile(pipe, x, warmup_runs=-1)
    for measured_runs in (0, -1):
        with pytest.raises(ValueError, match="measured_runs"):
            pl.profile(pipe, x, measured_runs=measured_runs)
    assert pipe.num_calls == 0


def test_something_that_cannot_be_called_is_an_input_error(x):
    with pytest.raises(InputError, match="cannot be called"):
        pl.profile(object(), x)
    with pytest.raises(InputError, match="inference_function"):
        pl.profile(nn.Linear(2, 2), x, inference_function=3)


def test_inference_function_is_noted(pipe, x, profile):
    assert not profile(pipe, x).data["config"]["uses_inference_function"]
    assert profile(pipe, x, inference_function=pipe).data["config"]["uses_inference_function"]


def test_a_bound_method_as_inference_function_is_seen(pipe, x, profile):
    result = profile(pipe, x, inference_function=pipe.vae.decode)
    assert [r["id"] for r in result.data["regions"]] == ["untuned_module:vae.decode"]
    assert result.data["warnings"] == [w for w in result.data["warnings"] if w["code"] == "PROFILED_BEFORE"]


def test_what_a_call_streams_is_consumed(x, profile):
    model = nn.Linear(8, 8)

    def stream(value):
        for _ in range(4):
            yield model(value)

    result = profile(model, x, inference_function=stream)
    assert result.data["runs"][0]["timing"]["wall_time_us"] > 0
    container = {"model": model}
    result = profile(_Holder(container), x, inference_function=stream)
    assert result.data["runs"][0]["regions"][0]["calls"] == 4


def test_a_second_profiler_is_refused_before_anything_runs(pipe, x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1) + 1
        with pytest.raises(RungError, match="another torch profiler"):
            pl.profile(pipe, x)
    assert pipe.num_calls == 0


def test_partial_is_called_with_the_input(pipe, x, profile):
    result = profile(pipe, {"x": x}, inference_function=partial(pipe, steps=2))
    assert result.data["runs"][0]["regions"][0]["calls"] == 2


class _Holder:
    def __init__(self, parts):
        self.parts = parts
