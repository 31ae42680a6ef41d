import functools
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from perfladder import _torch_private
from perfladder.errors import RungError
from perfladder.profiling import api, window
from perfladder.profiling.warnings import ProfileWarningCode
from perfladder.trace.warnings import WarningCode


def warnings_of(result):
    found = {w["code"]: w["message"] for w in result.data["warnings"]}
    found.pop("PROFILED_BEFORE", None)  # an earlier test has
    return found


def test_an_ordinary_profile_has_no_warnings(pipe, x, profile):
    assert warnings_of(profile(pipe, x)) == {}


def test_warnings_have_a_code_a_message_and_a_source(pipe, x, profile):
    for warning in profile(pipe, x, warmup_runs=0).data["warnings"]:
        assert set(warning) == {"code", "message", "source"}


def test_all_codes_are_documented():
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "profile.md").read_text() + (docs / "warnings.md").read_text()
    missing = [code for code in (*ProfileWarningCode, *WarningCode) if f"`{code}`" not in text]
    assert missing == []
    assert all(code.explanation for code in ProfileWarningCode)


def saved_references(pipe):
    """Ways to hold a method, each with the function that calls through it."""
    saved = pipe.vae.decode

    def by_default(value, call=saved):
        return call(value)

    return {
        "attribute": lambda value: pipe.saved(value),
        "list": lambda value: pipe.unet.saved[0](value),
        "closure": lambda value: saved(value),
        "default": by_default,
        "partial": functools.partial(saved, scale=2.0),
    }


@pytest.mark.parametrize("where", ["attribute", "list", "closure", "default", "partial"])
def test_a_method_bound_before_profiling_is_named(where, pipe, x, profile):
    if where == "attribute":
        pipe.saved = pipe.vae.decode
    elif where == "list":
        pipe.unet.saved = [pipe.vae.decode]
    found = warnings_of(profile(pipe, x, inference_function=saved_references(pipe)[where]))
    assert "vae.decode" in found["PREBOUND_METHOD"]


def test_a_method_looked_up_at_the_call_is_no_prebound_one(pipe, x, profile):
    found = warnings_of(profile(pipe, x, inference_function=lambda value: pipe.vae.decode(value)))
    assert found == {}


def test_modules_that_are_never_called_are_told(pipe, x, profile):
    other = nn.Linear(8, 8)
    result = profile(pipe, x, inference_function=lambda value: other(value))
    assert "HOOKS_DID_NOT_FIRE" in warnings_of(result)
    assert result.data["regions"] == []
    assert result.data["runs"][0]["residual"]["cpu_time_fraction"] == pytest.approx(1)


def test_an_object_without_modules_is_told(x, profile):
    found = warnings_of(profile(lambda value: value + 1, x))
    assert "HOOKS_DID_NOT_FIRE" in found


def test_the_inside_of_a_compiled_module_is_not_seen(pipe, x, profile):
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    pipe.vae = torch.compile(pipe.vae, backend="eager")
    result = profile(pipe, x)
    assert [r["id"] for r in result.data["regions"]] == ["untuned_module:unet", "untuned_module:vae.decode"]
    assert result.data["regions"][0]["module_type"].endswith(".Unet")
    assert "'unet'" in warnings_of(result)["COMPILED_MODULE"]
    assert result.data["region_tree"][0]["children"] == []


def test_a_module_compiled_in_place_is_seen_and_told(pipe, x, profile):
    pipe.unet.compile(backend="eager")
    compiled = pipe.unet._compiled_call_impl
    result = profile(pipe, x)
    assert result.data["runs"][0]["regions"][0] | {} == result.data["runs"][0]["regions"][0]
    assert [r["id"] for r in result.data["regions"]] == ["untuned_module:unet", "untuned_module:vae.decode"]
    assert result.data["runs"][0]["regions"][0]["calls"] == 3
    assert "'unet'" in warnings_of(result)["COMPILED_MODULE"]
    assert pipe.unet._compiled_call_impl is compiled


def test_a_module_with_a_compiled_forward_is_told(pipe, x, profile):
    pipe.unet.forward = torch.compile(pipe.unet.forward, backend="eager")
    result = profile(pipe, x)
    assert "'unet'" in warnings_of(result)["COMPILED_MODULE"]


def test_a_compiled_root_is_one_region(pipe, x, profile):
    result = profile(torch.compile(pipe.unet, backend="eager"), x)
    assert [r["id"] for r in result.data["regions"]] == ["untuned_module:Unet"]


def _infer_in_a_thread(pipe):
    def infer(value):
        thread = threading.Thread(target=lambda: pipe.unet(value))
        thread.start()
        thread.join()
        return pipe.vae.decode(value)

    return infer


def test_work_of_other_threads_is_recorded_and_in_no_fraction(pipe, x, profile):
    """R30: operators of other threads are absent by default."""
    result = profile(pipe, x, inference_function=_infer_in_a_thread(pipe))
    assert set(warnings_of(result)) == {"OTHER_THREADS"}
    for run in result.data["runs"]:
        unet, decode = run["regions"]
        assert (unet["region_id"], decode["region_id"]) == ("untuned_module:unet", "untuned_module:vae.decode")
        assert unet["cpu_time_fraction"] == 0
        assert unet["wall_time_us"] > 0
        assert decode["cpu_time_fraction"] + run["residual"]["cpu_time_fraction"] == pytest.approx(1, abs=1e-3)


def test_threads_that_are_not_recorded_are_told(pipe, x, profile, monkeypatch):
    monkeypatch.setattr(_torch_private, "can_record_all_threads", lambda: False)
    result = profile(pipe, x, inference_function=_infer_in_a_thread(pipe))
    assert "'unet'" in warnings_of(result)["THREADS_NOT_COVERED"]
    assert [r["id"] for r in result.data["regions"]] == ["untuned_module:vae.decode"]


def test_a_profiler_inside_the_call_is_an_error_by_name(pipe, x, profile):
    def infer(value):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return pipe(value)

    with pytest.raises(RungError, match="profiler of its own"):
        profile(pipe, x, inference_function=infer)


def test_a_result_says_whether_the_process_had_profiled_before(pipe, x, profile):
    profile(pipe, x)
    result = profile(pipe, x)
    assert result.data["profiler"]["had_profiled_before"]
    assert "PROFILED_BEFORE" in {w["code"] for w in result.data["warnings"]}


def test_the_plain_runs_come_before_the_profiler(pipe, x, profile, monkeypatch):
    order = []
    timed, profile_runs = api._timed, api.profile_runs
    monkeypatch.setattr(api, "_timed", lambda *a: order.append("plain") or timed(*a))
    monkeypatch.setattr(api, "profile_runs", lambda *a, **k: order.append("profiled") or profile_runs(*a, **k))
    result = profile(pipe, x, warmup_runs=3)
    assert order == ["plain", "profiled"]
    summary = result.data["summary"]
    plain = sorted(summary["unprofiled"]["wall_time_us"][1:])
    assert summary["unprofiled"]["wall_time_p50_us"] == pytest.approx(sum(plain) / 2)
    ratio = summary["profiled_wall_time_p50_us"] / summary["unprofiled"]["wall_time_p50_us"]
    assert summary["profiled_ratio"] == pytest.approx(ratio)


def test_without_warmups_the_cost_of_the_profiler_is_unknown(pipe, x, profile):
    result = profile(pipe, x, warmup_runs=0)
    assert result.data["summary"]["profiled_ratio"] is None
    assert "NO_UNPROFILED_RUNS" in warnings_of(result)


def test_an_observation_that_others_remove_is_told(pipe, x, profile):
    def infer(value):
        pipe.unet._forward_hooks.clear()
        return pipe(value)

    assert "HOOK_LOST" in warnings_of(profile(pipe, x, inference_function=infer))


def test_calls_that_never_end_are_counted(pipe, x, profile):
    class Stop(BaseException):
        pass

    class Raising(nn.Module):
        def forward(self, value):
            raise Stop

    pipe.extra = Raising()

    def infer(value):
        try:
            pipe.extra(value)
        except Stop:
            return pipe(value)

    assert "CALLS_CUT_OFF" in warnings_of(profile(pipe, x, inference_function=infer))


def test_a_tuned_region_that_is_no_part_of_the_object_is_told(pipe, x, profile):
    from perfladder.trace.record import span

    def infer(value):
        with span("aot_module", "elsewhere"):
            return pipe.unet(value)

    result = profile(pipe, x, inference_function=infer)
    found = warnings_of(result)
    assert "aot_module:elsewhere" in found["UNMAPPED_AOT_REGION_EVENTS"]
    assert {r["id"]: r["wrapper_state"] for r in result.data["regions"]} == {"aot_module:elsewhere": "unknown"}


def test_a_meter_is_used_only_where_a_device_is_recorded(pipe, x, profile, monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    monkeypatch.setattr(window, "MemoryObserver", None)
    profile(pipe, x)


def test_torchscript_is_profiled_as_one_region():
    import warnings

    import torch

    import perfladder as pl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(torch.nn.Linear(4, 4))
    profile = pl.profile(scripted, torch.ones(1, 4), warmup_runs=0, measured_runs=1)
    assert len(profile.data["runs"]) == 1
