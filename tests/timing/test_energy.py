import os

import pytest
import torch

from perfladder.errors import NotPossibleHereError
from perfladder.timing import energy
from perfladder.timing.energy import (
    EnergyRequest,
    NvmlEnergyMeter,
    NvmlPowerMeter,
    RaplMeter,
    energy_of_runs,
    measure_energy,
)


class FakeMeter:
    source = "rapl"
    covers = "package-0"

    def __init__(self):
        self.joules = 1000.0

    def read_j(self):
        return self.joules


def domain(folder, name, *, label, energy_uj, range_uj=1_000_000):
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(label + "\n")
    (path / "energy_uj").write_text(str(energy_uj))
    (path / "max_energy_range_uj").write_text(str(range_uj))
    return path


def test_energy_a_run_is_that_of_the_window_over_its_runs(clock):
    meter = FakeMeter()

    def run():
        clock.pass_ms(700)
        meter.joules += 35

    found = energy_of_runs(run, meter, items_per_call=7, clock=clock)
    assert (found.num_runs, found.window_s) == (3, 2.1)
    assert found.energy_j_per_run == pytest.approx(35)
    assert found.energy_j_per_item == pytest.approx(5)
    assert found.mean_power_w == pytest.approx(50)
    assert (found.source, found.reason) == ("rapl", None)


def test_one_long_run_is_enough(clock):
    assert energy_of_runs(lambda: clock.pass_ms(9000), FakeMeter(), 1, clock).num_runs == 1


def test_rapl_counts_packages_and_memory_but_nothing_twice(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", label="package-0", energy_uj=100)
    core = domain(tmp_path, "intel-rapl:0:0", label="core", energy_uj=50)
    dram = domain(tmp_path, "intel-rapl:0:1", label="dram", energy_uj=10)
    psys = domain(tmp_path, "intel-rapl:1", label="psys", energy_uj=500)
    meter = RaplMeter(tmp_path)
    for path, value in ((package, 2_000_100), (core, 1_000_000), (dram, 1_000_010), (psys, 9_000_000)):
        (path / "energy_uj").write_text(str(value))
    assert meter.read_j() == pytest.approx(3.0)
    assert "package-0, dram of the whole machine" in meter.covers


def test_rapl_counter_that_wraps_goes_on(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", label="package-0", energy_uj=900_000)
    meter = RaplMeter(tmp_path)
    (package / "energy_uj").write_text("100000")
    assert meter.read_j() == pytest.approx(0.2)
    (package / "energy_uj").write_text("300000")
    assert meter.read_j() == pytest.approx(0.4)


def test_machine_without_rapl_is_none_with_the_reason(wrap, tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "RAPL_FOLDER", tmp_path / "none")
    found = measure_energy(wrap(lambda: None), EnergyRequest())
    assert (found.energy_j_per_run, found.source, found.num_runs) == (None, None, 0)
    assert found.reason is not None
    assert "no RAPL counters" in found.reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_rapl_that_only_root_may_read_is_named(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", label="package-0", energy_uj=1)
    (package / "energy_uj").chmod(0)
    with pytest.raises(NotPossibleHereError, match=r"energy_uj cannot be read .* only root may"):
        RaplMeter(tmp_path)


def test_rapl_that_cannot_be_read_is_named(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", label="package-0", energy_uj=1)
    (package / "energy_uj").unlink()
    with pytest.raises(NotPossibleHereError, match="energy_uj cannot be read"):
        RaplMeter(tmp_path)


def test_run_of_a_workload_is_metered(wrap, clock, tmp_path, monkeypatch):
    package = domain(tmp_path, "intel-rapl:0", label="package-0", energy_uj=0, range_uj=10**9)

    def call():
        clock.pass_ms(1000)
        (package / "energy_uj").write_text(str(int((package / "energy_uj").read_text()) + 30_000_000))

    monkeypatch.setattr(energy, "RAPL_FOLDER", tmp_path)
    found = measure_energy(wrap(call, items_per_call=3), EnergyRequest(), clock=clock)
    assert (found.num_runs, found.energy_j_per_run, found.energy_j_per_item) == (2, 30, 10)


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, power_mw=None):
        self.power_mw = power_mw

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 12_500

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.power_mw is None:
            raise self.NVMLError("Not Supported")
        return self.power_mw


def test_nvml_counter_is_in_millijoules():
    assert NvmlEnergyMeter(FakeNvml(), "gpu").read_j() == 12.5


def test_power_samples_are_added_up(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: now[0])
    nvml = FakeNvml(power_mw=100_000)
    meter = NvmlPowerMeter(nvml, "gpu", because="Not Supported")
    now[0], nvml.power_mw = 12.0, 300_000
    assert meter.read_j() == pytest.approx(400), "two seconds at 200 W on average"


def test_gpu_that_tells_neither_energy_nor_power_is_named():
    with pytest.raises(NotPossibleHereError, match="neither energy nor power"):
        NvmlPowerMeter(FakeNvml(), "gpu", because="Not Supported")


def test_other_devices_have_no_known_counter():
    with pytest.raises(NotPossibleHereError, match="'meta'"), energy.open_meter(torch.device("meta")):
        pass


@pytest.mark.gpu
def test_gpu_counts_the_energy_of_its_runs():
    with energy.open_meter(torch.device("cuda", 0)) as meter:
        before = meter.read_j()
        x = torch.randn(4096, 4096, device="cuda")
        for _ in range(200):
            x = torch.nn.functional.normalize(x @ x)
        torch.cuda.synchronize()
        assert meter.read_j() > before
