import pytest
import torch

from perfladder.environment import DeviceProcess, DeviceSnapshot, Snapshot, take_snapshot, throttle_reasons
from perfladder.errors import NotPossibleHereError
from perfladder.timing import machine

CUDA = torch.device("cuda", 0)
IDLE = Snapshot(load_average_1m=0.1, num_cpus=4, available_memory_bytes=1 << 30)
BUSY = Snapshot(load_average_1m=3.0, num_cpus=4, available_memory_bytes=1 << 30)


@pytest.fixture
def state(monkeypatch):
    def of(**fields):
        found = DeviceSnapshot(index=0, **fields)
        monkeypatch.setattr(machine, "snapshot_of", lambda snapshot, device: found)

    return of


def test_idle_device_may_be_demanded(state):
    state()
    machine.require_idle(IDLE, CUDA)
    with pytest.raises(NotPossibleHereError, match=r"require_idle_device: The machine's load is 3.0"):
        machine.require_idle(BUSY, CUDA)
    state(other_processes=[DeviceProcess(pid=7, name="python")])
    with pytest.raises(NotPossibleHereError, match=r"Other processes use cuda:0: python \(pid 7\)"):
        machine.require_idle(IDLE, CUDA)


def test_throttling_after_the_last_run_is_a_warning(state):
    state(throttle_reasons=["power cap"], sm_clock_mhz=1200, temperature_c=83, power_w=700.2)
    (warning,) = machine.end_warnings(IDLE, CUDA)
    assert warning.code == "DEVICE_THROTTLED"
    assert "(power cap) at 1200 MHz, 83 °C, 700 W" in warning.message
    state(throttle_reasons=[])
    assert machine.end_warnings(IDLE, CUDA) == []
    state(throttle_reasons=None)
    assert machine.end_warnings(IDLE, CUDA) == []


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (None, None),
        (0x0, []),
        (0x1, []),
        (0x2, []),
        (0x4, ["power cap"]),
        (0x60, ["temperature (driver)", "temperature (hardware)"]),
    ],
)
def test_only_what_slows_a_busy_device_down_is_a_reason(bits, reasons):
    assert throttle_reasons(bits) == reasons


def test_snapshot_has_threads_and_clock_of_the_cpu():
    snapshot = take_snapshot()
    assert snapshot.torch_threads == torch.get_num_threads()
    assert snapshot.cpu_mhz is None or snapshot.cpu_mhz > 0
