"""Two real ranks around a target whose ranks differ, misbehave, or do not know that they are ranks."""

import json
import os
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from processes import MARK, marked

from perfladder.distributed import RankPlace, rank_device
from perfladder.errors import (
    InputError,
    NotPossibleHereError,
    WorkloadCrashError,
    WorkloadError,
    WorkloadTimeoutError,
)
from perfladder.ladder import climb
from perfladder.rank_session import RankSession, torchrun_environment
from perfladder.rungs.regions import RankRegions, RegionsResult
from perfladder.rungs.regions import run as run_regions
from perfladder.rungs.stages import StagesRequest
from perfladder.rungs.stages import measure as measure_stages
from perfladder.target import LoadedTarget, LoadRequest, load

wait_until = partial(processes.wait_until, limit_s=60)
LIMIT_S = 120

TARGET = """
    import os, signal, subprocess, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn

    RANK = int(os.environ.get("RANK", 0))

    class Work(nn.Module):
        def forward(self, x, repeats):
            for _ in range(repeats):
                x = torch.tanh(x @ x / 100)
            return x

    class Reduce(nn.Module):
        def forward(self, x):
            dist.all_reduce(x)
            return x

    class Pipe(nn.Module):
        def __init__(self):
            super().__init__()
            self.work, self.reduce, self.num_calls = Work(), Reduce(), 0

        def forward(self, slow=1, act="nothing", on=1, call=1):
            self.num_calls += 1
            if RANK == on and self.num_calls == call:
                globals()[act]()
            return self.reduce(self.work(torch.ones(128, 128), 300 if RANK == slow else 10))

    def build(act="nothing", group=True):
        if RANK == 1:
            globals()[act]()
        if group:
            dist.init_process_group("gloo")
        return Pipe()

    def build_alone():
        return Work()

    def nothing():
        pass

    def fail():
        raise ValueError("no luck")

    def be_killed():
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang():
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(1000)
"""


@pytest.fixture
def mark():
    return uuid.uuid4().hex


@pytest.fixture
def start(write_target, tmp_path, mark):
    """Start two ranks; they are closed at the end, and must then have left nothing."""
    sessions = []

    def make(*, build=None, call=None, **fields):
        fields = {"nproc": 2, "measured_runs": 3, "target_args": build or {}, "inputs": call or {}} | fields
        file = write_target(tmp_path, TARGET, **fields)
        session = RankSession(file, log_path=tmp_path / "session.log", environment={**os.environ, MARK: mark})
        session.__enter__()
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()
    assert marked(mark) == []


def time_stages(session, timeout_s=LIMIT_S):
    session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    return session.call(measure_stages, StagesRequest(), timeout_s=timeout_s)


def test_ranks_get_what_torchrun_sets():
    place = RankPlace(rank=1, world_size=4, meeting="m")
    found = torchrun_environment({"HOME": "/h", "RANK": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}, place, 1234)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert expected.items() <= found.items()
    assert found["HOME"] == "/h"
    assert found["OMP_NUM_THREADS"] == "1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    assert torchrun_environment({"OMP_NUM_THREADS": "3"}, place, 1)["OMP_NUM_THREADS"] == "3"


def test_file_of_a_rank_is_named_after_it():
    place = RankPlace(rank=3, world_size=4, meeting="m")
    assert place.own_path(Path("a.b/regions.trace.json")) == Path("a.b/regions.rank3.trace.json")


def test_several_ranks_in_this_process_are_refused(make_workload, tmp_path):
    with pytest.raises(NotPossibleHereError, match="nproc: several ranks cannot run in this one process"):
        LoadedTarget(make_workload(nproc=2), tmp_path).load()


@pytest.fixture
def four_devices(monkeypatch):
    """A machine with four accelerators; tells which one was made the current one."""
    chosen = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_each_rank_has_the_device_of_its_number(four_devices):
    place = RankPlace(rank=2, world_size=4, meeting="m")
    for name in ("auto", "cuda"):
        assert rank_device(name, torch.device("cuda", 0), place) == torch.device("cuda", 2)
    assert four_devices == [2, 2]
    assert rank_device("auto", torch.device("cpu"), place) == torch.device("cpu")


def test_one_device_for_several_ranks_is_refused(four_devices):
    with pytest.raises(InputError, match=r"device: 'cuda:0' is one device, but nproc is 4. Write 'cuda'"):
        rank_device("cuda:0", torch.device("cuda", 0), RankPlace(rank=0, world_size=4, meeting="m"))


def test_fewer_devices_than_ranks_are_not_possible_here(four_devices):
    with pytest.raises(NotPossibleHereError, match="nproc: 8 ranks need 8 cuda devices, but there are 4"):
        rank_device("auto", torch.device("cuda", 0), RankPlace(rank=0, world_size=8, meeting="m"))


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False])
def test_slower_rank_is_found_though_both_end_together(start, group):
    session = start(build={"group": group})
    result = time_stages(session)
    assert result.ranks.slowest_rank == 1
    assert {s.name: s.slowest_rank for s in result.ranks.stages} == {"work": 1, "reduce": 0}
    assert [len(own.wall_ms.values) for own in result.ranks.ranks] == [3, 3]
    assert not Path(session._folder).exists()
    assert result.ranks.ranks[1].lag_ms > result.ranks.ranks[0].lag_ms
    assert result.default.stages[0].name == "work"
    job = result.default
    for k, wall_ms in enumerate(job.wall_ms.values):
        assert wall_ms == max(own.wall_ms.values[k] for own in result.ranks.ranks)
        parts = [s.self_ms.values[k] for s in job.stages] + [job.outside_ms.values[k]]
        assert sum(parts) == pytest.approx(wall_ms)
    assert session.is_alive


@pytest.mark.slow
def test_target_that_knows_nothing_of_ranks_runs_on_each(start):
    result = time_stages(start(target="pipe.py:build_alone", inputs={"x": {"$tensor": [8, 8]}, "repeats": 2}))
    assert [own.rank for own in result.ranks.ranks] == [0, 1]
    assert result.default.wall_ms.values


@pytest.mark.slow
def test_rank_that_dies_is_named_and_ends_the_others(start, mark):
    session = start(call={"act": "be_killed", "call": 3})
    with pytest.raises(WorkloadCrashError, match=r"Rank 1 of 2: .*killed by SIGKILL") as caught:
        time_stages(session)
    assert "about to end" in str(caught.value)
    assert marked(mark) == []
    assert not session.is_alive


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1])
def test_rank_that_hangs_is_told_from_those_that_wait_for_it(start, mark, on):
    with pytest.raises(WorkloadTimeoutError, match=f"Rank {on} of 2 did not finish 'stages' within 6 s") as caught:
        time_stages(start(call={"act": "hang", "on": on, "call": 2}), timeout_s=6)
    assert f"rank {1 - on} waited for it" in str(caught.value)
    assert "in hang" in str(caught.value)
    assert marked(mark) == []


@pytest.mark.slow
def test_rank_that_raises_leaves_no_other_waiting(start, mark):
    with pytest.raises(WorkloadError, match="Rank 1 of 2: The workload's call raised: ValueError: no luck") as caught:
        time_stages(start(call={"act": "fail", "call": 2}))
    assert "Rank 0 of 2 waited for it, and all were ended" in str(caught.value)
    assert marked(mark) == []


@pytest.mark.slow
def test_factory_that_raises_on_one_rank_names_it(start):
    with pytest.raises(WorkloadError, match=r"Rank 1 of 2: The factory pipe.py:build raised: ValueError: no luck"):
        start(build={"act": "fail"}).call(load, LoadRequest(), timeout_s=LIMIT_S)


@pytest.mark.slow
def test_error_of_all_ranks_reads_as_that_of_one_process(start):
    session = start(stages=["nowhere"])
    with pytest.raises(InputError, match=r"^stages: .*nowhere"):
        time_stages(session)
    assert session.is_alive
    with pytest.raises(InputError, match=r"^stages: .*nowhere"):
        session.call(measure_stages, StagesRequest(), timeout_s=LIMIT_S)


OWNER = """
import os
import sys
from pathlib import Path
from perfladder.rank_session import RankSession
from perfladder.target import LoadRequest, load
from perfladder.workload import WorkloadFile, parse_workload
workload = parse_workload({"name": "x", "target": "pipe.py:build", "target_args": {"act": "hang"}, "nproc": 2})
file, log_path = WorkloadFile(workload, Path(sys.argv[1])), Path(sys.argv[2])
with RankSession(file, log_path=log_path, environment=dict(os.environ)) as session:
    session.call(load, LoadRequest(), timeout_s=600)
"""


@pytest.mark.slow
def test_killed_owner_leaves_no_rank(write_target, tmp_path, mark):
    write_target(tmp_path, TARGET)
    command = [sys.executable, "-c", OWNER, str(tmp_path), str(tmp_path / "session.log")]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}) as owner:
        try:
            # The owner, two guards, two ranks, and the hanging rank's own child.
            wait_until(lambda: len(marked(mark)) >= 6)
        finally:
            owner.send_signal(signal.SIGKILL)
        wait_until(lambda: marked(mark) == [])
        assert owner.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.slow
def test_ladder_has_the_ranks_where_it_can_and_says_where_not(write_target, tmp_path):
    file = write_target(tmp_path, TARGET, nproc=2, measured_runs=3)
    outcome = climb(file, runs_dir=tmp_path / "runs")
    assert (outcome.exit_code, outcome.status) == (0, "done")
    run = Path(outcome.run_dir)
    record = json.loads((run / "run.json").read_text())
    statuses = {rung["name"]: rung["status"] for rung in record["rungs"]}
    assert statuses == {"stages": "done", "regions": "done"} | dict.fromkeys(
        ("capture", "harness", "kernels"), "not_applicable"
    )
    regions = json.loads((run / "2-regions/regions.json").read_text())
    assert [own["trace"] for own in regions["ranks"]] == [f"regions.rank{k}.trace.json" for k in (0, 1)]
    for own in regions["ranks"]:
        trace = json.loads((run / "2-regions" / own["trace"]).read_text())
        assert trace["distributedInfo"]["rank"] == own["rank"]
    assert [own["is_shown"] for own in regions["ranks"]] == [False, True]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["rank_devices"] == ["cpu", "cpu"]
    report = (run / "report.md").read_text()
    assert "Rank 1 is the slowest" in report
    metric = json.loads((run / "1-stages/stages.json").read_text())["metric"]
    assert f"{metric['value']:.4g} ms" in report


def test_missing_trace_of_a_rank_is_named(tmp_path):
    ranks = [
        RankRegions(
            rank=k,
            is_shown=k == 0,
            trace=f"{k}.json",
            profiled_ms=1.0,
            device_busy_ms=None,
            residual_share=None,
            regions=[],
        )
        for k in (0, 1, 2)
    ]
    (tmp_path / "1.json").touch()
    context = SimpleNamespace(
        result=lambda kind: None,
        folder=tmp_path,
        workload=SimpleNamespace(timeout_s=1),
        broad=SimpleNamespace(call=lambda *args, **kwargs: RegionsResult(ranks=ranks)),
    )
    assert [w.message for w in run_regions(context).warnings] == ["Of 3 ranks these have no trace file: [0, 2]."]


@pytest.mark.gpu
@pytest.mark.slow
def test_every_device_serves_its_own_rank(write_target, tmp_path):
    """As many ranks as there are devices, in one NCCL group that perfladder makes."""
    count = torch.accelerator.device_count()
    if count < 2:
        pytest.skip("needs at least two devices")
    file = write_target(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn

        class Pipe(nn.Module):
            def __init__(self):
                super().__init__()
                self.work = nn.Linear(1024, 1024)

            def forward(self, x):
                for _ in range(50 if os.environ["RANK"] == "1" else 5):
                    x = self.work(x)
                dist.all_reduce(x)
                return x

        def build():
            return Pipe()
        """,
        device="auto",
        nproc=count,
        inputs={"x": {"$tensor": [1024, 1024]}},
    )
    outcome = climb(file, runs_dir=tmp_path / "runs")
    run = Path(outcome.run_dir)
    assert outcome.exit_code == 0
    kind = torch.accelerator.current_accelerator().type
    environment = json.loads((run / "environment.json").read_text())
    assert environment["rank_devices"] == [f"{kind}:{rank}" for rank in range(count)]
    result = json.loads((run / "1-stages/stages.json").read_text())
    assert [own["rank"] for own in result["ranks"]["ranks"]] == list(range(count))
    assert result["ranks"]["stages"][0]["slowest_rank"] == 1
    assert len(list((run / "2-regions").glob("regions.rank*.trace.json*"))) == count
