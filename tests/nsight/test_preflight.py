"""Each hindrance, found before anything runs, with what the user can do about it."""

import os

import psutil
import pytest

from perfladder.nsight import preflight, tool
from perfladder.nsight.preflight import REMEDIES, Gpu, check_machine
from perfladder.nsight.tool import find_ncu, find_reader

GPU = Gpu(name="NVIDIA H200", capability=(9, 0))


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch, tmp_path):
    """The machine's own tools are not looked at."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(tool, "_INSTALLED", (tmp_path / "nsight-compute",))


@pytest.fixture
def restricted(tmp_path):
    """A driver that lends counters to administrators only, and a process with or without the capability."""
    params = tmp_path / "params"
    params.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")

    def make(capabilities: str):
        status = tmp_path / "status"
        status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
        return {"params": params, "status": status}

    return make


def test_no_gpu_comes_first(monkeypatch):
    monkeypatch.setattr(preflight, "nvidia_gpu", lambda index: None)
    found = check_machine(holders=[])
    assert (found.obstacle, found.gpu) == ("no_nvidia_gpu", None)


def test_no_ncu_is_told_with_where_it_comes_from():
    found = check_machine(GPU, holders=[])
    assert found.obstacle == "no_ncu"
    assert "CUDA toolkit" in found.why_not


def test_ncu_is_found_on_the_path_with_its_version(install_ncu):
    path = install_ncu()
    found = check_machine(GPU, holders=[])
    assert (found.obstacle, found.ncu_path) == (None, str(path))
    assert found.ncu_version == "2025.3.1.0 (build 1) (public-release)"


def test_ncu_and_its_reader_are_found_where_installers_put_them(tmp_path, monkeypatch):
    newest = tmp_path / "nsight-compute" / "2025.3.1"
    for folder in (tmp_path / "nsight-compute" / "2024.1.0", newest):
        (folder / "extras" / "python").mkdir(parents=True)
        (folder / "extras" / "python" / "ncu_report.py").touch()
        (folder / "ncu").touch(mode=0o755)
    assert find_ncu().path == str(newest / "ncu")
    monkeypatch.setattr(tool, "PACKAGE", "ncu_report_not_installed")
    assert find_reader(None) is None
    monkeypatch.setattr(tool, "PACKAGE", "ncu_report")
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    assert find_reader(None).folder == newest / "extras" / "python"
    assert find_reader(str(tmp_path / "nsight-compute" / "2024.1.0" / "ncu")).folder.parts[-3] == "2024.1.0"


def test_no_reader_names_the_extra(install_ncu, monkeypatch):
    install_ncu()
    monkeypatch.setattr(preflight, "find_reader", lambda ncu: None)
    found = check_machine(GPU, holders=[])
    assert found.obstacle == "no_reader"
    assert "perfladder[ncu]" in found.why_not


def test_an_old_gpu_is_not_supported(install_ncu):
    install_ncu()
    found = check_machine(Gpu(name="Tesla P100", capability=(6, 0)), holders=[])
    assert found.obstacle == "unsupported_gpu"
    assert "Tesla P100 (6.0)" in found.why_not


@pytest.mark.parametrize(
    ("capabilities", "obstacle"),
    [
        ("0000000000000000", "no_permission"),
        ("00000000a80425fb", "no_permission"),  # root in a container, as Docker starts it
        ("000001ffffffffff", None),
        ("0000000000200000", None),
    ],
)
def test_permission_is_a_matter_of_the_capability_and_not_of_being_root(
    install_ncu, restricted, capabilities, obstacle
):
    install_ncu()
    found = check_machine(GPU, holders=[], **restricted(capabilities))
    assert (found.obstacle, found.is_restricted) == (obstacle, True)
    if obstacle:
        assert "NVreg_RestrictProfilingToAdminUsers=0" in found.why_not
        assert "--cap-add SYS_ADMIN" in found.why_not


def test_programs_that_may_hold_the_counters_are_named(monkeypatch):
    name = psutil.Process().name()
    monkeypatch.setattr(preflight, "_HOLDERS", (name,))
    assert f"{name} (pid {os.getpid()})" in preflight.running_holders()


def test_every_obstacle_has_a_remedy():
    assert all(text.endswith(".") for text in REMEDIES.values())
    assert set(REMEDIES) == set(preflight.Obstacle.__args__)
