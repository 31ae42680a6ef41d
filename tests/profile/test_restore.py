"""Nothing stays behind: no hook, no wrapper, no file."""

import inspect

import pytest
import torch

import perfladder as pl
from perfladder.errors import InputError
from perfladder.trace.model import Trace


def state_of(pipe):
    modules = [*pipe.unet.modules(), *pipe.vae.modules()]
    return [
        (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
        for m in modules
    ]


def test_everything_is_restored(pipe, x, profile):
    before = state_of(pipe)
    profile(pipe, x)
    assert state_of(pipe) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_everything_is_restored_when_inference_raises(error, pipe, x, profile):
    before = state_of(pipe)
    calls = []

    def infer(value):
        calls.append(1)
        pipe.unet.blocks[0].inner.register_forward_hook(fail, prepend=True) if len(calls) == 3 else None
        return pipe(value)

    def fail(*_):
        raise error("no")

    with pytest.raises(error, match="no"):
        profile(pipe, x, inference_function=infer)
    inner = pipe.unet.blocks[0].inner
    inner._forward_hooks.clear()
    assert state_of(pipe) == before
    assert torch.is_grad_enabled()
    assert len(profile(pipe, x).data["runs"]) == 2


def test_signatures_are_unchanged_under_the_wrappers(pipe, x, profile):
    plain = inspect.signature(pipe.vae.decode)
    seen = []

    def infer(value):
        seen.append((inspect.signature(pipe.vae.decode), pipe.vae.decode.__name__, "decode" in vars(pipe.vae)))
        return pipe(value)

    profile(pipe, x, inference_function=infer)
    assert {signature for signature, _, _ in seen} == {plain}
    assert {name for _, name, _ in seen} == {"decode"}
    assert seen[-1][2]


def test_nothing_is_written_without_a_trace_file(pipe, x, profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = profile(pipe, x)
    assert result.trace_file is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_is_kept_where_it_was_asked_for(name, pipe, x, profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = profile(pipe, x, trace_file=name)
    assert result.trace_file == tmp_path / name
    assert [path.name for path in tmp_path.iterdir()] == [name]
    names = Trace.read(result.trace_file).names
    assert "perfladder.untuned_module:vae.decode" in names
    assert "perfladder.profiled_run:1" in names


def test_a_trace_file_that_cannot_be_written_is_found_before_anything_runs(pipe, x, tmp_path):
    for path in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(InputError, match="trace_file"):
            pl.profile(pipe, x, trace_file=path)
    assert pipe.num_calls == 0


def test_the_function_stays_reachable_after_the_first_use():
    assert pl.profile is pl.profile
    assert callable(pl.profile)
