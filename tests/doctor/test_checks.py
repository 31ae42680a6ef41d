"""What `perfladder doctor` says of a machine: each limit with what to do, and nothing of what is no limit."""

import json

import pytest
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.doctor import checks
from perfladder.doctor.facts import Clocks, Disk, Facts, collect_facts, read_cpu_quota
from perfladder.environment import DeviceProcess, DeviceSnapshot, Environment, Snapshot

GIB = 2**30


def environment(**fields):
    usual = {
        "python": "3.12.1",
        "packages": {},
        "system": "Linux",
        "cpu": "a CPU",
        "num_cpus": 8,
        "total_memory_bytes": 32 * GIB,
        "torch_threads": 8,
        "torch_interop_threads": 8,
        "thread_variables": {},
        "accelerator": None,
        "driver": None,
        "accelerator_runtime": None,
        "devices": [],
    }
    return Environment(**{**usual, **fields})


def snapshot(**fields):
    return Snapshot(**{"load_average_1m": 0.1, "num_cpus": 8, "available_memory_bytes": 16 * GIB, **fields})


GOOD = Facts(physical_cores=8, compiler="/usr/bin/g++", has_python_headers=True)


def test_a_good_machine_has_nothing_to_do():
    packages = {"prefect": "3.9.1", "mlflow": "3.17.2", "tensorrt": None}
    found = [
        checks.check_accelerator(environment(), GOOD),
        checks.check_activities(environment(), ["CPU"]),
        checks.check_load(snapshot()),
        checks.check_threads(environment(), GOOD),
        checks.check_cpu_clock(snapshot(), GOOD),
        checks.check_memory(snapshot(), GOOD),
        checks.check_disk(Disk(used_for="runs", path="runs", free_bytes=50 * GIB, is_writable=True)),
        checks.check_compiler(environment(), GOOD),
        checks.check_packages(packages),
        checks.check_clocks(Clocks(index=0, sm_clock_mhz=300, max_sm_clock_mhz=1980, is_persistent=True)),
    ]
    assert [check.fix for check in found] == [None] * len(found)
    # Without a GPU it is a smaller machine, not a broken one.
    assert [check.status for check in found] == ["warning"] + ["ok"] * (len(found) - 1)


@pytest.mark.parametrize(
    ("check", "status", "says"),
    [
        (checks.check_accelerator(environment(driver="580.1"), GOOD), "warning", "built for CPUs"),
        (
            checks.check_accelerator(environment(driver="580.1"), GOOD.model_copy(update={"has_cuda_build": True})),
            "warning",
            "CUDA_VISIBLE_DEVICES",
        ),
        (checks.check_activities(environment(accelerator="cuda"), ["CPU"]), "missing", "Kineto"),
        (checks.check_load(snapshot(load_average_1m=5.0)), "warning", "require_idle_device"),
        (checks.check_threads(environment(torch_threads=16), GOOD), "warning", "OMP_NUM_THREADS=8"),
        (
            checks.check_threads(environment(), GOOD.model_copy(update={"cpu_quota": 2.5})),
            "warning",
            "OMP_NUM_THREADS=2",
        ),
        (
            checks.check_cpu_clock(snapshot(), GOOD.model_copy(update={"governors": ["powersave"]})),
            "warning",
            "cpupower",
        ),
        (checks.check_memory(snapshot(available_memory_bytes=GIB), GOOD), "warning", "larger machine"),
        (
            checks.check_memory(snapshot(), GOOD.model_copy(update={"shared_memory_bytes": 64 << 20})),
            "warning",
            "--shm-size",
        ),
        (
            checks.check_disk(Disk(used_for="runs", path="r", free_bytes=9 * GIB, is_writable=False)),
            "missing",
            "--out",
        ),
        (
            checks.check_disk(Disk(used_for="caches", path="r", free_bytes=1 << 20, is_writable=True)),
            "missing",
            "XDG_CACHE_HOME",
        ),
        (
            checks.check_disk(Disk(used_for="runs", path="r", free_bytes=2 * GIB, is_writable=True)),
            "warning",
            "perfladder gc",
        ),
        (checks.check_compiler(environment(), Facts()), "warning", "g++"),
        (checks.check_packages({"prefect": None, "mlflow": None}), "warning", "--plain"),
        (checks.check_clocks(Clocks(index=0, throttle_reasons=["power cap"])), "warning", "power limit"),
        (checks.check_clocks(Clocks(index=0, is_persistent=False)), "warning", "nvidia-smi -pm 1"),
        (checks.check_clocks(Clocks(index=0, is_mig=True)), "warning", "undivided"),
    ],
)
def test_each_limit_comes_with_what_to_do(check, status, says):
    assert check.status == status
    assert says in check.fix


def test_a_gpu_that_others_use_is_named():
    others = [DeviceProcess(pid=7, name="trainer")]
    state = snapshot(devices=[DeviceSnapshot(index=0, free_memory_bytes=GIB, other_processes=others)])
    device, clocks = checks.check_devices(state, [Clocks(index=0)])
    assert (device.status, "trainer (pid 7)" in device.detail) == ("warning", True)
    assert clocks.name == "clocks of device 0"


def test_quotas_of_both_kinds_of_control_groups_are_read(tmp_path):
    assert read_cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert read_cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert read_cpu_quota(tmp_path) == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert read_cpu_quota(tmp_path) is None


def test_facts_of_this_machine_are_those_of_its_kernel(tmp_path):
    facts = collect_facts({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "not" / "there")
    assert [disk.used_for for disk in facts.disks] == ["runs", "temporary files", "caches"]
    assert all(disk.is_writable and disk.free_bytes > 0 for disk in facts.disks)


def test_the_command_lists_every_check_for_people_and_programs():
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    document = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    for check in document["checks"]:
        assert check["name"] in shown.stdout
        assert (check["status"] == "ok") or check["needed_for"] in " ".join(shown.stdout.split())
