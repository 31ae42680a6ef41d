"""What others can see of a tuning: ranges of NVTX, and the samples of a process that ends with the one it watches."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from functools import partial

import processes
import pytest
from processes import MARK, marked

from perfladder.environment import nvml_session
from perfladder.errors import NotPossibleHereError
from perfladder.tuning.observe import HardwareMetrics, HardwareSummary

wait_until = partial(processes.wait_until, limit_s=20)

with nvml_session() as _nvml:
    NUM_DEVICES = 0 if _nvml is None else _nvml.nvmlDeviceGetCount()


def spend_cpu_time(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


@pytest.fixture(scope="module")
def watched():
    """A quiet start, then a block of each of two backends, of which the second one works hard and takes memory."""
    metrics = HardwareMetrics(period_s=0.02)
    with metrics:
        wait_until(lambda: len({sample.time_ns for sample in metrics.samples}) >= 3)
        with metrics.annotate(module="unet", graph="0"):
            with metrics.annotate(backend="eager"):
                time.sleep(0.1)
            with metrics.annotate(backend="busy"):
                held = b"x" * (64 << 20)
                spend_cpu_time(0.3)
        assert held
    return metrics


def test_samples_come_in_order_and_name_what_is_unknown(watched):
    moments = sorted({sample.time_ns for sample in watched.samples})
    assert [sample.time_ns for sample in watched.samples] == sorted(sample.time_ns for sample in watched.samples)
    assert len(watched.samples) == len(moments) * max(NUM_DEVICES, 1)
    first, *others = watched.samples[:: max(NUM_DEVICES, 1)]
    assert first.host_cpu_frac is None
    assert all(sample.host_cpu_frac is not None for sample in others)
    assert all(sample.host_rss_bytes > 10 << 20 for sample in watched.samples)


def test_last_sample_is_taken_when_stopped():
    with HardwareMetrics(period_s=600) as metrics:
        middle_ns = time.monotonic_ns()
    first, last = sorted({sample.time_ns for sample in metrics.samples})
    assert first < middle_ns < last
    assert not metrics.is_running


def test_samples_belong_to_the_block_they_were_taken_in(watched):
    busy, eager = watched.samples_of(backend="busy"), watched.samples_of(module="unet", backend="eager")
    assert busy
    assert eager
    assert eager[-1].time_ns < busy[0].time_ns
    assert watched.samples_of(graph="0")[0].time_ns == eager[0].time_ns
    assert watched.samples_of(module="vae") == []
    assert [(s.module, s.graph, s.backend) for s in watched.scopes] == [
        ("unet", "0", "eager"),
        ("unet", "0", "busy"),
        ("unet", "0", None),
    ]


def test_summary_tells_what_a_block_took(watched):
    busy, eager = watched.summary(backend="busy"), watched.summary(backend="eager")
    assert busy.host_cpu_frac.mean > eager.host_cpu_frac.mean
    assert busy.host_rss_bytes.max > eager.host_rss_bytes.max + (32 << 20)
    whole = watched.summary()
    assert whole.num_samples == len({sample.time_ns for sample in watched.samples})
    assert 0 <= whole.host_cpu_frac.mean <= whole.host_cpu_frac.max <= 1
    assert whole.duration_s > busy.duration_s
    assert HardwareSummary.model_validate_json(whole.model_dump_json()) == whole


def test_summary_without_samples_says_so(watched):
    none = watched.summary(module="vae")
    assert (none.num_samples, none.duration_s, none.host_cpu_frac) == (0, None, None)
    assert "no sample was taken in this time" in none.reason


@pytest.mark.skipif(NUM_DEVICES > 0, reason="this machine has an NVIDIA device")
def test_machine_without_nvidia_gives_the_host_and_says_so(watched):
    assert {(s.device_index, s.utilization_frac, s.memory_used_bytes, s.power_w) for s in watched.samples} == {
        (None, None, None, None)
    }
    assert watched.summary().devices == []
    assert "only the host was sampled" in watched.summary().reason


DRIVER = r"""
#include <stdio.h>
#include <string.h>

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
enum { OK = 0, NOT_SUPPORTED = 3 };

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1L); return OK; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "GPU %ld", (long)device - 1);
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *found) { found->gpu = 25 * (long)device; return OK; }
int nvmlDeviceGetMemoryInfo(void *device, memory *found) { found->used = 1000 * (long)device; return OK; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 70500;
    return (long)device == 1 ? OK : NOT_SUPPORTED;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a driver's library is compiled")
def test_each_device_has_its_samples_and_what_the_driver_does_not_tell_is_unknown(monkeypatch, tmp_path):
    """The real binding, over a driver of two devices of which the second one does not tell its power."""
    (tmp_path / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with HardwareMetrics(period_s=600) as metrics:
        pass
    found = [(s.device_index, s.utilization_frac, s.memory_used_bytes, s.power_w) for s in metrics.samples]
    assert found == [(0, 0.25, 1000, 70.5), (1, 0.5, 2000, None)] * 2
    summary = metrics.summary()
    assert (summary.num_samples, summary.reason) == (2, None)
    first, second = summary.devices
    assert (first.name, first.power_w.mean, first.memory_used_bytes.max) == ("GPU 0", 70.5, 1000)
    assert (second.device_index, second.name, second.power_w) == (1, "GPU 1", None)
    assert second.utilization_frac.mean == 0.5


@pytest.mark.gpu
def test_devices_are_sampled():
    import torch

    with HardwareMetrics(period_s=0.02) as metrics:
        held = torch.ones(1 << 28, device="cuda")
        for _ in range(2000):
            held.mul_(1.0)
        torch.cuda.synchronize()
    summary = metrics.summary()
    assert len(summary.devices) == NUM_DEVICES
    assert max(device.memory_used_bytes.max for device in summary.devices) > held.nbytes
    assert max(device.utilization_frac.max for device in summary.devices) > 0
    assert all(device.power_w.mean > 0 for device in summary.devices if device.power_w is not None)
    assert summary.reason is None


def test_sampling_can_start_again():
    metrics = HardwareMetrics(period_s=600)
    for count in (2, 4):
        with metrics:
            pass
        assert len({sample.time_ns for sample in metrics.samples}) == count


def test_sampler_that_does_not_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "psutil.py").write_text("raise ImportError('psutil is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(NotPossibleHereError, match=r"does not start: ImportError: psutil is broken\. Set"):
        HardwareMetrics().start()


def test_sampler_that_dies_is_a_reason_and_costs_nothing_else():
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        metrics = HardwareMetrics(period_s=600)
        metrics.start()
    wait_until(lambda: len(marked(mark)) == 2)
    sampler = next(pid for pid in marked(mark) if b"guard.py" not in _command_of(pid))
    os.kill(sampler, signal.SIGKILL)
    wait_until(lambda: marked(mark) == [])
    metrics.stop()
    assert "sampling ended early" in metrics.summary().reason
    assert metrics.samples


def _command_of(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


PARENT = """
import os, time
from perfladder.tuning.observe import HardwareMetrics
metrics = HardwareMetrics()
metrics.start()
{then}
print("ready", flush=True)
time.sleep(600)
"""
FORKS = """
if os.fork() == 0:  # holds copies of all pipes open, and carries no mark
    os.execvpe("sleep", ["sleep", "20"], {})
"""


@pytest.mark.parametrize("then", ["", FORKS])
def test_sampler_ends_with_a_parent_that_is_killed(then):
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    ) as parent:
        try:
            assert parent.stdout.readline() == b"ready\n"
            wait_until(lambda: len(marked(mark)) == 3)  # what is forked carries the mark until it is replaced
            os.kill(parent.pid, signal.SIGKILL)
            wait_until(lambda: marked(mark) == [])
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


SAMPLER = [sys.executable, "-m", "perfladder.tuning.hardware_sampler"]


def test_sampler_ends_when_nobody_reads_any_more():
    with subprocess.Popen(
        [*SAMPLER, str(os.getpid()), "0.02"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline().startswith(b'{"devices"')
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == b""


def test_sampler_ends_when_the_watched_process_is_gone():
    with subprocess.Popen(["sleep", "600"]) as watched:
        command = [*SAMPLER, str(watched.pid), "0.02"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout.readline().startswith(b'{"devices"')
            watched.kill()
            watched.wait()
            _, errors = process.communicate(timeout=20)
            assert (process.returncode, errors) == (0, b"")


TOOL = r"""
#include <stdint.h>
#include <stdio.h>

typedef void (*function)(void);
typedef struct {
    size_t size;
    int (*module_table)(int module, function ***table, unsigned *num_functions);
} callbacks;

static void *create_domain(const char *name) { printf("domain %s\n", name); return (void *)name; }
static void *register_string(void *domain, const char *text) { printf("string %s\n", text); return (void *)text; }
static int push(void *domain, const void *attributes) { puts("push"); return 0; }
static int pop(void *domain) { puts("pop"); return 0; }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const callbacks *found = export_table(1);
    function **table;
    unsigned num_functions;
    if (!found || !found->module_table(5, &table, &num_functions)) return 0;
    *table[4] = (function)push;
    *table[5] = (function)pop;
    *table[10] = (function)register_string;
    *table[12] = (function)create_domain;
    return 1;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a tool for NVTX is compiled")
def test_range_names_module_and_backend_in_its_own_domain(tmp_path):
    """As a profiler sees it: a tool that NVTX loads prints what it is told."""
    (tmp_path / "tool.c").write_text(TOOL)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "tool.so"), str(tmp_path / "tool.c")]
    subprocess.run(command, check=True)
    source = (
        "from perfladder.tuning.observe import nvtx_range\n"
        "with nvtx_range('build', module='unet.block', backend='inductor', enabled=True): pass\n"
        "with nvtx_range('record', enabled=False): pass\n"
        "with nvtx_range('check', enabled=True): pass\n"
    )
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tmp_path / "tool.so")}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        "domain perfladder",
        "string build module:unet.block backend:inductor",
        "push",
        "pop",
        "string check",
        "push",
        "pop",
    ]


def test_range_that_is_off_imports_nothing():
    source = (
        "import sys; from perfladder.tuning.observe import nvtx_range\n"
        "with nvtx_range('build', module='m', enabled=False): print('nvtx' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
