"""Tuning a workload through its own call: what is chosen, what is shown for it, and what is kept."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
import uuid
import warnings

import pytest
import torch
from documents import printed
from processes import MARK, marked, wait_until

import perfladder as pl
from perfladder.errors import InputError
from perfladder.report import render_tuning
from perfladder.session import Session
from perfladder.stats import Samples, compare_samples
from perfladder.target import LoadRequest
from perfladder.target import load as load_session
from perfladder.tuning.config import config
from perfladder.tuning.module import Module
from perfladder.tuning.timesteps import host_timesteps_in
from perfladder.tuning.tune_evidence import decide
from perfladder.tuning.tune_request import BackendChoice, GateChoice, TuneRequest
from perfladder.tuning.tune_result import OutputComparison, TuneWorkloadResult
from perfladder.tuning.tune_workload import measure

SOURCE = """
    import os, time
    from pathlib import Path

    import torch
    from torch import nn

    import perfladder as pl
    from perfladder.backend import Backend, BackendConfig


    class Repeating(nn.Module):
        '''Does its work again and again, so that doing it once is faster for certain.'''

        def __init__(self, width=128):
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x):
            for _ in range(50):
                result = self.inner(x)
            return result


    class Once(Backend):
        name = "toy_once"
        is_isolated = False

        def compile(self, request):
            return lambda x: request.module.inner(x)


    class OffsetConfig(BackendConfig):
        offset: float = 1.0
        is_lossy: bool = False


    class Offset(Backend):
        name = "toy_offset"
        config_class = OffsetConfig
        is_isolated = False

        @property
        def is_lossy(self):
            return self.config.is_lossy

        def compile(self, request):
            return lambda x: request.module.inner(x) + self.config.offset


    class Twice(Backend):
        name = "toy_twice"
        is_isolated = False

        def compile(self, request):
            return lambda x: (request.forward(x), request.forward(x))[1]


    class Waiting(Backend):
        '''Says that it is tried, and then waits for a file.'''

        name = "toy_waiting"
        is_isolated = False

        def compile(self, request):
            here = Path(__file__).parent
            (here / "tried").touch()
            while not (here / "go").exists():
                time.sleep(0.02)
            return request.module.inner.forward


    for kind in (Once, Offset, Twice, Waiting):
        pl.backend.register_backend(kind)


    class Pipe:
        def __init__(self, is_random=False, signs=False):
            self.net = Repeating().eval()
            self.head = nn.Linear(128, 8)
            self.is_random, self.signs = is_random, signs

        def __call__(self, x):
            result = self.head(self.net(x))
            if self.is_random:
                result = result + torch.rand(1, generator=GENERATOR)
            return (result > 0).float() if self.signs else result


    GENERATOR = torch.Generator()


    def build(**options):
        return Pipe(**options)


    def build_module():
        return Repeating().eval()


    def build_training():
        pipe = Pipe()
        pipe.net.train()
        return pipe
"""
INPUTS = {"x": {"$tensor": [8, 128]}}
LIMIT_S = 10


@pytest.fixture
def load(load_target, tmp_path):
    """The target above, with a cache of its own."""
    before = config.snapshot()
    config.cache_dir = tmp_path / "cache"

    def make(**fields):
        return load_target(SOURCE, **{"inputs": INPUTS, **fields})

    yield make
    config.cache_dir = before.cache_dir


def tune(loaded, *backends, **fields):
    # By name, since noise can give any share of so short a call to any module.
    if not fields.keys() & {"modules", "min_share"}:
        fields["modules"] = ["net"]
    choices = [BackendChoice.parse(text) for text in backends]
    return measure(loaded, TuneRequest(backends=choices, pairs=10, **fields))


def test_what_is_faster_on_the_whole_is_kept(load):
    loaded = load()
    plain = loaded.run().value
    result = tune(loaded, "toy_offset", "toy_once", min_share=0.0, limit=1)
    assert (result.status, result.saved_to, result.num_unseen_calls, result.notes) == ("kept", None, 0, [])
    (module,) = result.modules
    assert (module.path, module.error, module.graphs[0].selected) == ("net", None, "Once()")
    assert 0 < module.share <= 1
    assert [tried.status for tried in module.graphs[0].candidates] == ["rejected", "kept"]
    assert module.graphs[0].inputs == ["x float32 [8, 128]"]
    evidence = result.evidence
    assert len(evidence.plain_ms.values) == len(evidence.tuned_ms.values) == 10
    assert evidence.comparison.interval.low > 1
    assert (evidence.output.is_right, evidence.output.max_abs_error, evidence.output.not_compared) == (True, 0.0, [])
    even = evidence.break_even
    assert 0 < even.saved_ms_per_call < evidence.plain_ms.summary.p50
    assert even.calls_for_build <= even.calls_for_tuning
    assert even.tuning_s == result.duration_s > 0
    assert isinstance(loaded.obj.net, Module)
    assert loaded.run().value.equal(plain)
    assert TuneWorkloadResult.model_validate_json(result.model_dump_json()) == result


def test_the_report_for_people_tells_all_of_it(load):
    text = render_tuning(tune(load(), "toy_offset", "toy_once"))
    assert "# Tuning of `test` on cpu: kept" in text
    assert "| `Offset()` | rejected |" in text
    assert "- `Offset()`: sample 0: output: largest error" in text
    assert "| `Once()` | kept |" in text
    assert "- Output: the same." in text
    assert re.search(r"[\d,]+ calls? pays? for the builds of what was chosen \(0\.0 s\), [\d,]+ for the whole", text)
    assert "Shapes are fixed" in text


def test_a_slower_candidate_leaves_modules_as_they_are(load):
    loaded = load()
    result = tune(loaded, "toy_twice", "eager", keep="right")
    assert (result.status, result.evidence) == ("rejected", None)
    assert "No candidate is better than the plain modules" in result.reason
    assert result.modules[0].graphs[0].selected == "eager"
    assert not isinstance(loaded.obj.net, Module)


def test_a_module_that_cannot_be_tuned_says_why(load):
    loaded = load(target="pipe.py:build_training")
    result = tune(loaded, "toy_once", modules=["net"])
    assert (result.status, result.modules[0].share) == ("rejected", None)
    assert "training mode" in result.modules[0].error
    assert "Stays as it is: net is in training mode" in render_tuning(result)


def test_a_speedup_below_the_one_asked_for_is_given_up(load):
    loaded = load()
    result = tune(loaded, "toy_once", keep=1e6)
    assert result.status == "rejected"
    assert "A speedup of 1e+06 or more was asked for" in result.reason
    assert result.evidence.comparison.verdict == "faster"
    assert not isinstance(loaded.obj.net, Module)


def test_a_whole_output_that_is_wrong_is_never_kept(load):
    # Each module's output is alike enough for a lossy backend, and the pipeline's is not.
    loaded = load(target_args={"signs": True})
    options = "toy_offset:offset=0.05,is_lossy=true"
    result = tune(loaded, options, keep="right", modules=["net"])
    assert result.modules[0].graphs[0].candidates[0].status == "kept"
    assert result.status == "rejected"
    assert result.evidence.output.gate == "cosine >= 0.99"
    assert "The whole output is not right" in result.reason
    assert not isinstance(loaded.obj.net, Module)


def test_a_gate_on_the_whole_output_rejects_a_candidate(load):
    gate = GateChoice(metric="psnr", minimum=60)
    result = tune(load(), "toy_offset:offset=0.05,is_lossy=true", "toy_once", quality=gate)
    first, second = result.modules[0].graphs[0].candidates
    assert (first.status, second.status, result.status) == ("rejected", "kept", "kept")
    assert "psnr of the whole output" in first.reason


def test_a_gate_that_cannot_measure_the_output_is_told_before_anything_is_built(load, tmp_path):
    loaded = load()
    with pytest.raises(InputError, match=r"quality: ssim needs images"):
        tune(loaded, "toy_once", quality=GateChoice(metric="ssim", minimum=0.9))
    assert not isinstance(loaded.obj.net, Module)
    assert not (tmp_path / "cache" / "records").exists()


def test_a_workload_that_differs_from_itself_proves_nothing_about_its_output(load):
    result = tune(load(target_args={"is_random": True}), "toy_once")
    assert (result.status, result.evidence.output.is_right) == ("kept", None)
    assert "two plain calls differ" in result.evidence.output.reason
    assert "- Output: not decided; two plain calls differ" in render_tuning(result)


def test_the_target_itself_can_be_the_module(load):
    loaded = load(target="pipe.py:build_module")
    result = tune(loaded, "toy_once", min_share=0.0)
    assert (result.status, result.modules[0].path) == ("kept", "")
    assert isinstance(loaded.obj, Module)
    assert result.evidence.comparison.verdict == "faster"


def test_what_was_found_is_reused_and_forgotten_on_request(load):
    assert [c.is_reused for c in tune(load(), "toy_once").modules[0].graphs[0].candidates] == [False]
    again = tune(load(), "toy_once")
    assert (again.status, [c.is_reused for c in again.modules[0].graphs[0].candidates]) == ("kept", [True])
    assert "candidates known from before were not tried again" in render_tuning(again)
    cleared = tune(load(), "toy_once", clear_cache=True)
    assert [c.is_reused for c in cleared.modules[0].graphs[0].candidates] == [False]


def test_what_is_kept_is_saved_and_serves_a_fresh_object(load, tmp_path):
    result = tune(load(), "toy_once", save=str(tmp_path / "tuned.ait"))
    assert result.saved_to == str(tmp_path / "tuned.ait")
    assert "Saved to" in render_tuning(result)
    fresh = load().obj
    pl.load(fresh, tmp_path / "tuned.ait")
    assert fresh.net.state == "tuned"
    rejected = tune(load(), "toy_once", save=str(tmp_path / "other.ait"), keep=1e6)
    assert (rejected.saved_to, (tmp_path / "other.ait").exists()) == (None, False)
    assert "Nothing was saved." in render_tuning(rejected)


def test_a_dry_run_builds_nothing(load):
    loaded = load()
    result = tune(loaded, "toy_once", "eager", dry_run=True)
    assert (result.status, result.evidence) == ("dry_run", None)
    assert result.modules[0].graphs[0].backends == ["Once()", "TorchEagerBackend()"]
    assert result.modules[0].graphs[0].candidates == []
    assert not isinstance(loaded.obj.net, Module)
    assert "would try `Once()`, `TorchEagerBackend()`" in render_tuning(result)


def test_other_strategies_choose_too(load):
    for strategy, fields in (
        ("max-throughput", {}),
        ("min-latency", {}),
        ("latency-budget", {"latency_budget_ms": 1e4}),
    ):
        result = tune(load(), "toy_twice", "toy_once", strategy=strategy, clear_cache=True, **fields)
        assert result.modules[0].graphs[0].selected == "Once()", strategy
    result = tune(load(), "toy_once", strategy="one-backend")
    assert result.modules[0].graphs[0].selected == "Once()"


def test_warnings_of_perfladder_are_notes_and_others_stay_warnings(load):
    config.min_num_samples = 5
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = tune(load(), "toy_once")
    finally:
        config.min_num_samples = 1
    assert [str(one.message) for one in caught] == []
    (note,) = result.notes
    assert "fewer than config.min_num_samples = 5" in note


def test_settings_of_the_process_are_as_before(load, tmp_path):
    before = config.snapshot()
    result = tune(load(), "toy_once", cache_dir=str(tmp_path / "other"), isolate_builds=False)
    assert result.report_path == str(tmp_path / "other" / "tuning_report.json")
    assert config.snapshot() == before


def test_progress_tells_candidates_and_pairs(load):
    loaded, told = load(), []
    loaded.tell = told.append
    tune(loaded, "toy_offset", "toy_once")
    tried = [now for now in told if "trying" in now.label]
    assert {now.num_total for now in tried} == {2}
    assert all(now.limit_s > loaded.workload.timeout_s for now in tried)
    assert [now.num_done for now in told if now.label == "timing the whole workload"] == list(range(10))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules": ["nett"]}, "Did you mean 'net'"),
        ({"min_share": 1.0}, "the largest is net with 0."),
        ({"modules": ["net", "net.inner"]}, "wrap one of them"),
    ],
)
def test_modules_that_cannot_be_chosen_are_named(load, fields, message):
    loaded = load()
    with pytest.raises(InputError, match=message):
        tune(loaded, "toy_once", **fields)
    assert not isinstance(loaded.obj.net, Module)


def test_unknown_backends_and_options_are_refused(load):
    with pytest.raises(InputError, match="Did you mean 'toy_once'"):
        tune(load(), "toy_onc")
    with pytest.raises(InputError, match="offse: unknown field"):
        tune(load(), "toy_offset:offse=1")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what Inductor imports
def test_a_workload_that_compiles_its_modules_is_refused(load):
    with pytest.raises(InputError, match="--set compile=null"):
        tune(load(compile={"only": ["net"]}), "toy_once")


@pytest.mark.parametrize(("keep", "is_kept"), [("faster", False), ("right", True), (0.5, True), (1.1, False)])
def test_a_whole_that_is_no_faster_is_kept_only_where_that_is_accepted(keep, is_kept):
    sides = [Samples(launches=[[10.0 + 0.1 * (n % 3 + shift * (n % 2)) for n in range(20)]]) for shift in (0, 0)]
    comparison = compare_samples(*sides, interleaved=True)
    output = OutputComparison(
        is_right=True, reason=None, max_abs_error=0, max_rel_error=0, quality=None, gate=None, not_compared=[]
    )
    assert decide(keep, comparison, output)[0] is is_kept
    wrong = output.model_copy(update={"is_right": False, "reason": "another shape"})
    assert decide(keep, comparison, wrong) == (False, "The whole output is not right: another shape.")


@pytest.mark.slow
def test_a_candidate_may_take_longer_than_the_time_limit_of_a_run(write_target, tmp_path):
    file = write_target(tmp_path, SOURCE, inputs=INPUTS)
    request = TuneRequest(
        modules=["net"], backends=[BackendChoice(name="toy_waiting")], pairs=10, cache_dir=str(tmp_path / "cache")
    )
    told = []

    def on_progress(progress):
        told.append(progress.label)
        if "trying" in progress.label:
            threading.Timer(LIMIT_S + 2, (tmp_path / "go").touch).start()

    with Session(file, log_path=tmp_path / "log.txt", environment=dict(os.environ)) as session:
        session.call(load_session, LoadRequest(), timeout_s=100)
        result = session.call(measure, request, timeout_s=LIMIT_S, on_progress=on_progress)
    assert result.status == "kept"
    assert told[0] == "recording calls of batch size 1"
    assert told[-1] == "timing the whole workload"


@pytest.fixture
def command(write_target, tmp_path):
    """The command line on the target above, in a folder of its own, as a function that starts it."""
    write_target(tmp_path, SOURCE)
    text = "name: toys\ntarget: pipe.py:build\ndevice: cpu\ninputs: {x: {$tensor: [8, 128]}}\n"
    (tmp_path / "pipe.yaml").write_text(text)
    mark = uuid.uuid4().hex

    def start(*arguments):
        words = [str(tmp_path / "pipe.yaml"), "--cache-dir", str(tmp_path / "cache"), "--pairs", "10", *arguments]
        return subprocess.Popen(
            [sys.executable, "-m", "perfladder.cli", "tune", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: mark},
        )

    start.mark = mark
    yield start
    assert marked(mark) == []


def finished(process):
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_command_line(command):
    code, out, err = finished(command("--backend", "toy_once", "--json"))
    assert (code, err) == (0, "")
    result = TuneWorkloadResult.model_validate(printed("tune", out))
    assert (result.status, result.workload) == ("kept", "toys")
    code, out, err = finished(command("--backend", "toy_twice", "--fail-if-not-faster"))
    assert code == 1
    assert "# Tuning of `toys` on cpu: not kept" in out
    # How many modules are worth tuning depends on their share of the time.
    assert re.search(r"trying Twice\(\) \(0 of [12]\)", err)


def test_command_line_refuses_what_is_wrong(command):
    code, out, err = finished(command("--backend", "toy_onc", "--json"))
    assert code == 2
    assert "Did you mean 'toy_once'" in printed("error", out)["error"]["message"]
    code, out, err = finished(command("--set", "inputs.x={$tensor: [8, 3]}"))
    assert (code, out) == (3, "")
    assert "RuntimeError" in err


@pytest.mark.slow
def test_a_tuning_that_was_killed_goes_on_where_it_was(command, tmp_path):
    arguments = ("--backend", "toy_twice", "--backend", "toy_waiting", "--json")
    first = command(*arguments)
    wait_until((tmp_path / "tried").exists, limit_s=100)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not marked(command.mark), limit_s=30)
    (tmp_path / "go").touch()
    code, out, err = finished(command(*arguments))
    assert code == 0, err
    candidates = json.loads(out)["modules"][0]["graphs"][0]["candidates"]
    assert [(c["description"], c["status"], c["is_reused"]) for c in candidates] == [
        ("Twice()", "rejected", True),
        ("Waiting()", "kept", False),
    ]


@pytest.mark.slow
def test_a_compiler_is_tuned_in_processes_of_its_own(command):
    code, out, err = finished(command("--backend", "inductor_jit", "--module", "net", "--keep", "right", "--json"))
    assert code == 0, err
    result = TuneWorkloadResult.model_validate(json.loads(out))
    (tried,) = result.modules[0].graphs[0].candidates
    assert tried.status in ("kept", "rejected")
    assert tried.trial_s > 0
    assert tried.build_s > 0
    if result.status == "kept":
        assert result.evidence.output.is_right
        assert result.evidence.break_even.build_s == pytest.approx(tried.trial_s + tried.build_s, abs=0.01)


def test_a_result_that_is_handed_over_wider_is_as_exact_as_what_computed_it(load_target, monkeypatch, tmp_path):
    monkeypatch.setattr(config, "cache_dir", tmp_path / "cache")
    source = (
        SOURCE
        + "\n    def build_half():\n        pipe = Pipe()\n        pipe.net.to(torch.float16)\n        return pipe\n"
    )
    loaded = load_target(
        source.replace("self.net(x)", "self.net(x.to(self.net.inner.weight.dtype)).float()"),
        target="pipe.py:build_half",
        inputs=INPUTS,
    )
    result = tune(loaded, "toy_offset:offset=0.002", modules=["net"], keep="right", strategy="one-backend")
    assert result.modules[0].error is None
    assert result.evidence.output.is_right
    assert result.evidence.output.max_rel_error > 1e-4


SAMPLER = """
    import time

    import torch
    from torch import nn


    class Scheduler:
        '''Its step takes long where it is given one of its own timesteps, as if it waited for a device.'''

        waits_for_own, error, is_picky = True, 0.0, False

        def __init__(self):
            self.timesteps = torch.arange(2)

        def set_timesteps(self, count):
            self.timesteps = torch.arange(count)

        def step(self, model_output, timestep, sample):
            is_own = timestep.untyped_storage().data_ptr() == self.timesteps.untyped_storage().data_ptr()
            if self.is_picky and not is_own:
                raise RuntimeError("expected all tensors on one device")
            if is_own == self.waits_for_own:
                time.sleep(0.01)
            return sample + model_output * timestep + (0.0 if is_own else self.error)


    class Pipe:
        def __init__(self):
            torch.manual_seed(0)
            self.net, self.scheduler = nn.Linear(16, 16).eval(), Scheduler()

        def __call__(self, x):
            self.scheduler.set_timesteps(3)
            for t in self.scheduler.timesteps:
                x = self.scheduler.step(self.net(x), t, x)
            return x


    def build():
        return Pipe()


    def build_wrong():
        Scheduler.error = 1.0
        return Pipe()


    def build_picky():
        Scheduler.is_picky = True
        return Pipe()


    def build_slow():
        Scheduler.waits_for_own = False
        return Pipe()


    def build_other():
        pipe = Pipe()
        step = pipe.scheduler.step
        pipe.scheduler.step = lambda model_output, timestep, sample: step(model_output, timestep.clone(), sample)
        return pipe
"""


class TestSchedulers:
    """A CPU plays the device that steps wait for."""

    @pytest.fixture
    def sampler(self, load_target, tmp_path, monkeypatch):
        monkeypatch.setattr(config, "cache_dir", tmp_path / "cache")
        waits = [lambda t: isinstance(t, torch.Tensor)]
        monkeypatch.setattr("perfladder.tuning.timesteps.waits_for_device", lambda t: waits[0](t))
        monkeypatch.setattr("perfladder.tuning.tune_evidence.waits_for_device", lambda t: waits[0](t))
        monkeypatch.setattr(torch, "Event", lambda device: types.SimpleNamespace(record=int, synchronize=int))

        def make(factory="build"):
            inputs = {"x": {"$tensor": [4, 16]}}
            return load_target(SAMPLER, target=f"pipe.py:{factory}", inputs=inputs)

        return make

    def test_one_whose_steps_wait_is_kept_and_saved(self, sampler, tmp_path):
        loaded = sampler()
        plain = loaded.run().value
        result = tune(loaded, "eager", min_share=0.0, save=str(tmp_path / "tuned.ait"))
        (scheduler,) = result.schedulers
        assert (scheduler.path, scheduler.status, scheduler.num_served) == ("scheduler", "kept", 3)
        assert scheduler.comparison.interval.low > 1
        assert result.status == "kept"
        assert result.evidence.output.max_abs_error == 0
        assert list(host_timesteps_in(loaded.obj)) == ["scheduler"]
        assert loaded.run().value.equal(plain)
        assert list(host_timesteps_in(pl.load(sampler().obj, result.saved_to))) == ["scheduler"]
        text = render_tuning(result)
        assert "(Scheduler): timesteps from the host" in text
        assert "3 steps of a call get their timestep from the host" in text

    @pytest.mark.parametrize(
        ("factory", "status", "says"),
        [
            ("build_wrong", "rejected", "the output is not right: "),
            ("build_picky", "rejected", "with timesteps from the host: The workload's call raised"),
            ("build_slow", "rejected", ""),
            ("build_other", "not_applicable", "no step was called with one of the timesteps"),
        ],
    )
    def test_others_stay_as_they_are(self, sampler, factory, status, says):
        loaded = sampler(factory)
        result = tune(loaded, "eager", min_share=0.0)
        (scheduler,) = result.schedulers
        assert scheduler.status == status
        assert says in scheduler.reason
        assert (result.status, result.evidence) == ("rejected", None)
        assert not host_timesteps_in(loaded.obj)
        assert scheduler.reason.splitlines()[0] in render_tuning(result)

    def test_one_that_the_target_gave_them_to_already_stays_so(self, sampler):
        loaded = sampler()
        host = pl.HostTimesteps(loaded.obj.scheduler)
        result = tune(loaded, "eager", min_share=0.0)
        assert result.schedulers[0].status == "not_applicable"
        assert "already" in result.schedulers[0].reason
        assert host_timesteps_in(loaded.obj) == {"scheduler": host}

    def test_timesteps_of_the_host_are_not_tried(self, sampler, monkeypatch):
        monkeypatch.undo()
        result = tune(sampler(), "eager", min_share=0.0)
        assert result.schedulers[0].status == "not_applicable"
        assert "not on an accelerator" in result.schedulers[0].reason

    def test_one_that_is_not_asked_for_is_not_tried(self, sampler):
        assert tune(sampler(), "eager", modules=["net"]).schedulers == []
        assert tune(sampler(), "eager", modules=["net", "scheduler"]).schedulers[0].status == "kept"
        with pytest.raises(InputError, match="--module: scheduler is no module; name at least one"):
            tune(sampler(), "eager", modules=["scheduler"])

    def test_a_dry_run_tries_none(self, sampler):
        assert tune(sampler(), "eager", modules=["net", "scheduler"], dry_run=True).schedulers == []
