"""Schedulers that take their timesteps from the host: which numbers they get, and that they stay the objects they are.

On a CPU the waiting device is played: its timesteps count as lying elsewhere. Those marked `gpu` have a real one.
"""

import copy
import inspect
import pickle
import types

import pytest
import torch

import perfladder as pl
from perfladder.errors import ArchiveError, InputError
from perfladder.target import LoadedTarget
from perfladder.tuning import timesteps as module
from perfladder.tuning.timesteps import HostTimesteps, find_schedulers, host_timesteps_in
from perfladder.workload import TunedArchive, load_workload
from perfladder.workloads import diffusion

diffusers = pytest.importorskip("diffusers")

SCHEDULERS = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "LCMScheduler")


class Event:
    def __init__(self, device):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def elsewhere(monkeypatch):
    """Timesteps of a CPU count as an accelerator's."""
    monkeypatch.setattr(module, "waits_for_device", lambda t: isinstance(t, torch.Tensor) and t.dim() == 1)
    monkeypatch.setattr(torch, "Event", Event)


def sampled(scheduler, steps=4):
    """Latents of a few steps with a network that is none."""
    torch.manual_seed(0)
    latents = torch.randn(1, 4, 8, 8)
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        noise = scheduler.scale_model_input(latents, t) * 0.1
        latents = scheduler.step(noise, t, latents, return_dict=False)[0]
    return latents


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_results_of_real_schedulers_are_the_same(name):
    expected = sampled(getattr(diffusers, name)())
    scheduler = getattr(diffusers, name)()
    host = HostTimesteps(scheduler)
    for _ in range(2):
        torch.testing.assert_close(sampled(scheduler), expected, rtol=0, atol=0)
    assert host.num_served == 8
    host.deactivate()
    sampled(scheduler)
    assert host.num_served == 8
    assert "_perfladder_timesteps" not in vars(scheduler)
    assert type(scheduler) is getattr(diffusers, name)


@pytest.fixture
def noted(elsewhere):
    scheduler = diffusers.DDIMScheduler()
    host = HostTimesteps(scheduler)
    scheduler.set_timesteps(5)
    return scheduler, host


def test_each_timestep_is_told_by_where_it_lies(noted):
    scheduler, host = noted
    host._copy = scheduler.timesteps + 10_000  # so that it shows where a number is from
    every = [*scheduler.timesteps]
    assert [int(host.on_host(t)) for t in every] == [int(t) + 10_000 for t in every]
    assert int(host.on_host(scheduler.timesteps[2:][1])) == int(every[3]) + 10_000
    assert int(host.on_host(scheduler.timesteps[::2][1])) == int(every[2]) + 10_000


@pytest.mark.parametrize(
    "given",
    [
        lambda timesteps: timesteps[0].clone(),
        lambda timesteps: timesteps[0] + 0,
        lambda timesteps: timesteps[:2],
        lambda timesteps: timesteps[0].expand(3),
        lambda timesteps: timesteps[1].view(torch.float64),
        lambda timesteps: int(timesteps[0]),
        lambda timesteps: None,
    ],
)
def test_what_is_no_timestep_is_passed_on(noted, given):
    scheduler, host = noted
    value = given(scheduler.timesteps)
    assert host.on_host(value) is value


def test_timesteps_that_are_changed_or_replaced_are_passed_on(noted):
    scheduler, host = noted
    first = scheduler.timesteps[0]
    assert host.on_host(first) is not first
    scheduler.timesteps = scheduler.timesteps.clone()
    other = scheduler.timesteps[0]
    assert host.on_host(other) is other
    scheduler.set_timesteps(5)
    scheduler.timesteps += 1
    changed = scheduler.timesteps[0]
    assert host.on_host(changed) is changed


def test_it_stays_the_object_it_is_and_copies_are_plain(noted):
    scheduler, _ = noted
    plain = diffusers.DDIMScheduler
    assert isinstance(scheduler, plain)
    assert (type(scheduler).__name__, type(scheduler).__module__) == (plain.__name__, plain.__module__)
    assert inspect.signature(scheduler.step) == inspect.signature(plain().step)
    assert "timesteps" not in inspect.signature(scheduler.set_timesteps).parameters
    for copied in (copy.deepcopy(scheduler), copy.copy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert type(copied) is plain
        assert not host_timesteps_in(types.SimpleNamespace(scheduler=copied))
        torch.testing.assert_close(copied.timesteps, scheduler.timesteps)
    assert scheduler.from_config(scheduler.config).config == scheduler.config


def test_a_later_one_takes_the_place_of_an_earlier_one(noted):
    scheduler, first = noted
    kind = type(scheduler).__mro__[1]
    second = HostTimesteps(scheduler)
    sampled(scheduler)
    assert (first.num_served, second.num_served) == (0, 4)
    assert len(type(scheduler).__mro__) == len(kind.__mro__) + 1
    first.deactivate()
    assert host_timesteps_in(types.SimpleNamespace(scheduler=scheduler)) == {"scheduler": second}
    second.deactivate()
    assert type(scheduler) is diffusers.DDIMScheduler


def test_while_a_graph_is_recorded_nothing_is_waited_for(noted, monkeypatch):
    scheduler, host = noted
    first = scheduler.timesteps[0]
    monkeypatch.setattr(module, "is_recorded", lambda device: True)
    monkeypatch.setattr(Event, "synchronize", lambda event: pytest.fail("it waits"))
    assert host.on_host(first) is first


def test_timesteps_of_the_host_itself_are_left_alone():
    scheduler = diffusers.DDIMScheduler()
    host = HostTimesteps(scheduler)
    sampled(scheduler)
    assert host.num_served == 0


def test_what_is_no_scheduler_is_refused():
    with pytest.raises(InputError, match="a Linear has not all of timesteps, set_timesteps, step"):
        pl.HostTimesteps(torch.nn.Linear(2, 2))


def test_a_class_that_cannot_be_derived_from_is_refused():
    class Sealed(type):
        def __new__(cls, name, bases, names):
            if bases:
                raise TypeError("it is sealed")
            return super().__new__(cls, name, bases, names)

    class Scheduler(metaclass=Sealed):
        def __init__(self):
            self.timesteps = torch.arange(3)

        def set_timesteps(self, count):
            pass

        def step(self, model_output, timestep):
            pass

    scheduler = Scheduler()
    with pytest.raises(InputError, match=r"Scheduler cannot be derived from: it is sealed\."):
        HostTimesteps(scheduler)
    assert type(scheduler) is Scheduler
    assert vars(scheduler).keys() == {"timesteps"}


def test_they_are_found_where_they_lie_and_once():
    scheduler, other = diffusers.DDIMScheduler(), diffusers.LCMScheduler()
    pipe = types.SimpleNamespace(
        scheduler=scheduler, again=scheduler, inner={"first": [other]}, net=torch.nn.Linear(2, 2)
    )
    assert find_schedulers(pipe) == {"scheduler": scheduler, "inner.first.0": other}


@pytest.mark.usefixtures("elsewhere")
def test_an_archive_tells_which_schedulers(tmp_path):
    pipe = diffusion.build()
    with pytest.raises(InputError, match="no tuned module"):
        pl.save(pipe, tmp_path / "none.ait")
    HostTimesteps(pipe.scheduler)
    path = pl.save(pipe, tmp_path / "host.ait")
    fresh = pl.load(diffusion.build(), path)
    assert list(host_timesteps_in(fresh)) == ["scheduler"]
    fresh(prompt="a", num_inference_steps=3, output_type="latent")
    assert host_timesteps_in(fresh)["scheduler"].num_served == 3
    assert not host_timesteps_in(pl.load(diffusion.build(), path, modules=[]))
    other = diffusion.build()
    other.scheduler = diffusers.LCMScheduler()
    with pytest.raises(ArchiveError, match=r"scheduler is a .*DDIMScheduler, but here is a .*LCMScheduler"):
        pl.load(other, path)
    with pytest.raises(ArchiveError, match="does not fit this Linear"):
        pl.load(torch.nn.Linear(2, 2), path)
    file = load_workload("diffusion")
    tuned = TunedArchive(archive=str(path))
    loaded = LoadedTarget(file.workload.model_copy(update={"tuned": tuned}), file.base_dir)
    loaded.load()
    assert loaded.tuned_modules == ["scheduler"]
    assert list(host_timesteps_in(loaded.obj)) == ["scheduler"]


@pytest.mark.usefixtures("elsewhere")
def test_a_built_in_workload_loads_an_archive_of_the_working_directory(tmp_path, monkeypatch):
    pipe = diffusion.build()
    HostTimesteps(pipe.scheduler)
    pl.save(pipe, tmp_path / "host.ait")
    monkeypatch.chdir(tmp_path)
    file = load_workload("diffusion")
    for name in ("host.ait", "host"):
        loaded = LoadedTarget(file.workload.model_copy(update={"tuned": TunedArchive(archive=name)}), file.base_dir)
        loaded.load()
        assert loaded.tuned_modules == ["scheduler"]
    with pytest.raises(ArchiveError, match=r"there is no archive .other\.ait.: neither /.* nor /.*checkpoints"):
        LoadedTarget(
            file.workload.model_copy(update={"tuned": TunedArchive(archive="other.ait")}), file.base_dir
        ).load()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_results_on_a_device_are_the_same(name):
    def run(scheduler):
        torch.manual_seed(0)
        # In float16 a factor on the host is not rounded before it is used, and one on the device is.
        latents = torch.randn(1, 4, 8, 8, device="cuda")
        scheduler.set_timesteps(4, device="cuda")
        for t in scheduler.timesteps:
            latents = scheduler.step(scheduler.scale_model_input(latents, t) * 0.1, t, latents, return_dict=False)[0]
        return latents

    expected, scheduler = run(getattr(diffusers, name)()), getattr(diffusers, name)()
    host = HostTimesteps(scheduler)
    torch.testing.assert_close(run(scheduler), expected, rtol=0, atol=0)
    assert host.num_served == 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_no_device():
    scheduler = diffusers.DDIMScheduler()
    latents = torch.randn(1, 4, 8, 8, device="cuda")

    def steps():
        scheduler.set_timesteps(4, device="cuda")
        every = [*scheduler.timesteps]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for t in every:
                scheduler.step(latents, t, latents)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.raises(RuntimeError, match="synchronizing"):
        steps()
    HostTimesteps(scheduler)
    steps()
