"""Peaks of a device: measured once, kept, read again; the data sheet where that fails."""

import json
import re

import pytest
import torch

from perfladder import peaks
from perfladder.peaks import DATASHEETS, Peaks, datasheet_peaks, find_peaks, measure_peaks

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Buffers that take milliseconds."""
    monkeypatch.setattr(peaks, "_MIN_SIDE", 32)
    monkeypatch.setattr(peaks, "_MAX_SIDE", {"cpu": 64})
    monkeypatch.setattr(peaks, "_COPY_BYTES", {"cpu": 1 << 16})


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements instead of making them."""
    made = []

    def measure(device, *, clock):
        made.append(device)
        return Peaks(
            device="toy", source="measured", compute_tflops={"float32": float(len(made))}, bandwidth_gb_per_s=1.0
        )

    monkeypatch.setattr(peaks, "measure_peaks", measure)
    return made


def test_rates_are_work_over_the_clocks_time(small):
    """Each look at this clock is 50 ms after the last, so every batch is one step of 50 ms."""
    now = iter(range(0, 10**12, 50_000_000))
    found = measure_peaks(CPU, clock=lambda: next(now))
    assert set(found.compute_tflops) == {"float32", "bfloat16", "float16"}
    assert found.compute_tflops["float32"] == pytest.approx(2 * 32**3 / 0.05 / 1e12)
    assert found.bandwidth_gb_per_s == pytest.approx(2 * (1 << 16) / 0.05 / 1e9)
    assert (found.source, found.num_threads, found.reason) == ("measured", torch.get_num_threads(), None)


def test_real_clock_gives_positive_rates_and_leaves_the_random_state_alone(small):
    before = torch.random.get_rng_state()
    found = measure_peaks(CPU)
    assert all(value > 0 for value in (*found.compute_tflops.values(), found.bandwidth_gb_per_s))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_measured_peaks_are_kept_and_read_again(measured, tmp_path):
    folder = tmp_path / "cache" / "perfladder"
    first, second = find_peaks(CPU, folder), find_peaks(CPU, folder)
    assert first == second
    assert len(measured) == 1
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["source"] == "measured"
    path.write_text("{")
    assert find_peaks(CPU, folder).compute_tflops == {"float32": 2.0}


def test_another_number_of_threads_is_another_device(measured, tmp_path, monkeypatch):
    find_peaks(CPU, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    find_peaks(CPU, tmp_path)
    assert len(measured) == 2


def test_without_a_folder_or_with_one_that_cannot_be_written_nothing_is_kept(measured, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (None, None, tmp_path / "file" / "below"):
        assert find_peaks(CPU, folder) is not None
    assert len(measured) == 3


def test_what_cannot_be_measured_is_from_the_data_sheet_and_says_so(monkeypatch, tmp_path):
    def fail(device, *, clock):
        raise torch.OutOfMemoryError("no memory\nat all")

    monkeypatch.setattr(peaks, "measure_peaks", fail)
    monkeypatch.setattr(peaks, "device_name", lambda device: "NVIDIA H200")
    found = find_peaks(CPU, tmp_path)
    assert (found.source, found.label, found.bandwidth_gb_per_s) == ("datasheet", "data sheet", 4800)
    assert found.reason == "measuring failed: no memory"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(peaks, "device_name", lambda device: "Toy 3000")
    assert find_peaks(CPU, tmp_path) is None


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA L40S", 864),
        ("NVIDIA L4", 300),
        ("A100-PCIE-40GB", 1555),
        ("NVIDIA A100 80GB PCIe", 1935),
    ],
)
def test_data_sheets_are_found_by_the_drivers_name(name, bandwidth):
    assert datasheet_peaks(name, reason="").bandwidth_gb_per_s == bandwidth


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA B200", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb"),
        *("NVIDIA RTX A1000", "NVIDIA L40", "NVIDIA GeForce RTX 4090", "Tesla T4", ""),
    ],
)
def test_device_that_is_only_named_alike_has_no_data_sheet(name):
    assert datasheet_peaks(name, reason="") is None


def test_data_sheets_are_in_order_of_precision():
    for sheet in DATASHEETS:
        assert 1 < sheet.float32 <= sheet.tf32 < sheet.half


def test_figures_are_those_that_the_sheet_states_and_dense():
    """Each row quotes its sheet; figures quoted with sparsity are twice those of the row."""
    for sheet in DATASHEETS:
        quoted = re.search(r"FP32 ([\d.]+), TF32 ([\d.,]+) and BF16 ([\d.,]+) (with|without) sparsity", sheet.sheet)
        float32, tf32, half = (float(text.replace(",", "")) for text in quoted.groups()[:3])
        ratio = 2 if quoted[4] == "with" else 1
        assert (sheet.float32, sheet.tf32 * ratio, sheet.half * ratio) == (float32, tf32, half), sheet.names
        amount, unit = re.search(r"([\d.,]+) (TB/s|GB/s)", sheet.sheet).groups()
        assert sheet.bandwidth_gb_per_s == pytest.approx(
            float(amount.replace(",", "")) * (1000 if unit == "TB/s" else 1)
        )
        assert datasheet_peaks(f"NVIDIA {sheet.names[0]}", reason="").datasheet == sheet.sheet


def test_no_device_has_two_data_sheets():
    names = [name for sheet in DATASHEETS for name in sheet.names]
    assert len(names) == len(set(names))


@pytest.mark.gpu
def test_measured_peaks_of_a_gpu_are_near_its_data_sheet():
    device = torch.device("cuda:0")
    before = torch.backends.cuda.matmul.fp32_precision
    found = measure_peaks(device)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert set(found.compute_tflops) == {"float32", "tf32", "bfloat16", "float16"}
    assert found.compute_tflops["float32"] < found.compute_tflops["tf32"] < found.compute_tflops["bfloat16"]
    sheet = datasheet_peaks(found.device, reason="")
    if sheet is not None:
        assert 0.4 < found.bandwidth_gb_per_s / sheet.bandwidth_gb_per_s < 1.05
        assert 0.4 < found.compute_tflops["bfloat16"] / sheet.compute_tflops["bfloat16"] < 1.05
