import inspect

import pytest
import torch

from perfladder.errors import InputError
from perfladder.workload import load_workload
from perfladder.workloads import streaming

SMALL = {"num_chunks": 2, "num_inference_steps": 2, "frames_per_chunk": 2, "height": 32, "width": 48}


@pytest.fixture
def num_transformer_calls(generator):
    calls = []
    hook = generator.transformer.register_forward_hook(lambda *_: calls.append(1))
    yield lambda: len(calls)
    hook.remove()


def test_packaged_inputs_give_finite_chunks(generator):
    chunks = list(generator(**load_workload("streaming").workload.inputs))
    assert [tuple(chunk.shape) for chunk in chunks] == [(8, 3, 64, 64)] * 4
    for chunk in chunks:
        assert chunk.min() >= 0
        assert chunk.max() <= 1
        assert chunk.std() > 0.01
        assert not chunk.requires_grad


def test_chunk_is_yielded_before_the_next_is_computed(generator, num_transformer_calls):
    chunks = generator(**SMALL)
    assert inspect.isgenerator(chunks)
    assert num_transformer_calls() == 0
    next(chunks)
    assert num_transformer_calls() == 2
    next(chunks)
    assert num_transformer_calls() == 4
    assert next(chunks, None) is None


def test_gradients_are_as_the_caller_set_them_between_chunks(generator):
    for _ in generator(**SMALL):
        assert torch.is_grad_enabled()


def test_same_seed_gives_the_same_video(generator):
    first, again, other = (list(generator(**SMALL, seed=seed)) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_same_seed_builds_the_same_weights(generator):
    again, other = streaming.build(), streaming.build(seed=1)
    for name in ("transformer", "decoder"):
        weights = [
            torch.nn.utils.parameters_to_vector(getattr(g, name).parameters()) for g in (generator, again, other)
        ]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])


def test_velocity_depends_on_time_and_context(generator):
    latents, context = torch.randn(2, 4, 4, 4), torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        velocity = generator.transformer(latents, torch.tensor(1.0), context)
        later = generator.transformer(latents, torch.tensor(0.5), context)
        elsewhere = generator.transformer(latents, torch.tensor(1.0), context + 1)
    assert velocity.shape == latents.shape
    assert not torch.allclose(velocity, later)
    assert not torch.allclose(velocity, elsewhere)


def test_patches_go_back_to_where_they_came_from(generator):
    """A change in one latent pixel moves its own patch the most: the token grid is not transposed or shuffled."""
    latents, context = torch.zeros(1, 4, 8, 12), torch.zeros(1, 4, 8, 12)
    changed = latents.clone()
    changed[0, :, 2, 8] = 3.0
    with torch.no_grad():
        before, after = (generator.transformer(x, torch.tensor(0.5), context) for x in (latents, changed))
    difference = (after - before).abs().amax(dim=(0, 1))
    row, column = divmod(int(difference.argmax()), 12)
    assert (row // 2, column // 2) == (1, 4)


def test_euler_steps_reach_the_data_along_a_straight_path():
    scheduler = streaming.FlowEulerScheduler()
    noise, data = torch.randn(3), torch.randn(3)
    times, latents = scheduler.times(4), noise
    assert times == [1.0, 0.75, 0.5, 0.25, 0.0]
    for index in range(4):
        latents = scheduler.step(noise - data, times[index], times[index + 1], latents)
    torch.testing.assert_close(latents, data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_finite(dtype):
    chunk = next(streaming.build(dtype=dtype)(**SMALL))
    assert chunk.dtype == getattr(torch, dtype)
    assert chunk.isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"height": 40}, "height=40: expected a multiple of 16"),
        ({"width": 0}, "width=0"),
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
    ],
)
def test_wrong_input_is_refused_by_name(generator, wrong, message):
    with pytest.raises(ValueError, match=message):
        next(generator(**(SMALL | wrong)))


def test_base_size_is_for_a_gpu():
    base = streaming.build("base", device="meta")
    assert 250e6 < sum(parameter.numel() for parameter in base.transformer.parameters()) < 350e6


def test_unknown_size_is_refused():
    with pytest.raises(InputError, match="tiny, base"):
        streaming.build("huge")
