"""Profile before tuning, tune, profile after: the same call twice, on a real pipeline."""

import json
from pathlib import Path

import pytest
import torch

import perfladder as pl


@pytest.fixture(scope="module")
def pipeline():
    pytest.importorskip("diffusers")
    from perfladder.workloads import diffusion

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield diffusion.build()
    torch.set_num_threads(num_threads)


def test_baseline_and_tuned_profile(pipeline, wrap, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = [{"prompt": "A beautiful landscape with mountains and a lake"}]

    def infer(prompt):
        return pipeline(prompt, width=64, height=64, num_inference_steps=3)

    baseline = pl.profile(obj=pipeline, input_data=inputs[0], inference_function=infer, measured_runs=3)
    Path("baseline_profile.json").write_text(json.dumps(baseline.data, indent=2) + "\n")
    Path("baseline_profile.md").write_text(baseline.markdown())
    ids = [region["id"] for region in baseline.data["regions"]]
    assert ids == ["untuned_module:text_encoder", "untuned_module:unet", "untuned_module:vae.decode"]
    assert {row["region_id"]: row["calls"] for row in baseline.data["runs"][0]["regions"]}["untuned_module:unet"] == 3
    assert {w["code"] for w in baseline.data["warnings"]} <= {"PROFILED_BEFORE"}
    assert baseline.trace_file is None

    pipeline.text_encoder = wrap(pipeline.text_encoder)
    try:
        tuned = pl.profile(
            obj=pipeline,
            input_data=inputs[0],
            inference_function=infer,
            warmup_runs=1,
            measured_runs=2,
            trace_file="tuned_trace.json",
        )
    finally:
        pipeline.text_encoder = pipeline.text_encoder.module
    Path("tuned_profile.md").write_text(tuned.markdown())
    assert tuned.trace_file == tmp_path / "tuned_trace.json"
    assert tuned.data["regions"][0]["id"] == "aot_module:text_encoder"
    for run in (*baseline.data["runs"], *tuned.data["runs"]):
        covered = sum(row["cpu_time_fraction"] for row in run["regions"])
        assert covered + run["residual"]["cpu_time_fraction"] == pytest.approx(1, abs=1e-3)
        covered_us = sum(row["cpu_time_us"] for row in run["regions"]) + run["residual"]["cpu_time_us"]
        # The clock is read inside the run's span, so the span is the longer one, by less than a hundredth.
        assert run["timing"]["wall_time_us"] * 0.999 < covered_us < run["timing"]["wall_time_us"] * 1.01 + 1000
