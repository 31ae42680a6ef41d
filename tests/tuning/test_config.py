"""The settings of a process: checked when set, read when a call starts, and the folder that a cache is kept in."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import cache_folder, private_folder
from perfladder.tuning.config import TuningConfig, TuningSettings, default_cache_dir, read_environment


@pytest.fixture
def config(tmp_path):
    return TuningConfig.of({"XDG_CACHE_HOME": str(tmp_path)})


def test_defaults(config, tmp_path):
    assert config.snapshot().model_dump(mode="json") == {
        "cache_dir": str(tmp_path / "perfladder" / "tuning"),
        "min_num_samples": 1,
        "max_num_samples_stored": 4,
        "max_num_graphs": 32,
        "device_after_tuning": "keep",
        "strict_mode": True,
        "unseen_graph": "eager",
        "tuning_data_output_path": None,
        "enable_transformers_integration": True,
        "enable_diffusers_integration": True,
        "nvtx": False,
        "hardware_metrics": False,
        "isolate_builds": True,
        "build_timeout_s": 1800.0,
        "build_max_memory_bytes": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("min_num_samples", 5, 5),
        ("device_after_tuning", "meta", "meta"),
        ("device_after_tuning", torch.device("cuda:1"), "cuda:1"),
        ("unseen_graph", "error", "error"),
        ("strict_mode", False, False),
        ("build_timeout_s", 5, 5.0),
        ("build_max_memory_bytes", 1 << 30, 1 << 30),
        ("cache_dir", "/somewhere/else", Path("/somewhere/else")),
        ("tuning_data_output_path", Path("/a/report.json"), Path("/a/report.json")),
        ("tuning_data_output_path", None, None),
    ],
)
def test_values_that_are_accepted(config, name, value, kept):
    setattr(config, name, value)
    assert getattr(config, name) == kept
    assert type(getattr(config, name)) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("min_num_samples", 0, "min_num_samples: should be greater than or equal to 1"),
        ("min_num_samples", True, "min_num_samples: .*integer"),
        ("max_num_samples_stored", 0, "max_num_samples_stored"),
        ("max_num_graphs", "many", "max_num_graphs: .*integer.*'many'"),
        ("device_after_tuning", "GPU 1", "device_after_tuning"),
        ("device_after_tuning", 1, "device_after_tuning"),
        ("strict_mode", "yes", "strict_mode: .*boolean.*'yes'"),
        ("unseen_graph", "raise", "unseen_graph: got 'raise'; accepted: 'eager' or 'error'"),
        ("nvtx", 1, "nvtx"),
        ("build_timeout_s", 0, "build_timeout_s"),
        ("build_timeout_s", float("inf"), "build_timeout_s"),
        ("build_max_memory_bytes", -1, "build_max_memory_bytes"),
        ("cache_dir", "", "cache_dir: a path is needed"),
        ("cache_dir", None, "cache_dir"),
        ("cache_dir", "~nobody-of-this-name/x", "cache_dir: '~' stands for a home"),
    ],
)
def test_wrong_value_names_its_field_and_changes_nothing(config, name, value, says):
    before = config.snapshot()
    with pytest.raises(InputError, match=says):
        setattr(config, name, value)
    assert config.snapshot() == before


def test_unknown_setting_suggests_near_names(config):
    with pytest.raises(InputError, match=r"config\.strict_mod: unknown setting\. Did you mean 'strict_mode'"):
        config.strict_mod = False


def test_snapshot_does_not_change(config):
    before = config.snapshot()
    config.max_num_graphs = 3
    assert (before.max_num_graphs, config.snapshot().max_num_graphs) == (32, 3)
    assert type(before) is TuningSettings
    with pytest.raises(ValidationError, match="frozen"):
        before.max_num_graphs = 4


def test_paths_are_expanded_and_do_not_move_with_the_process(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config.cache_dir = "~/builds"
    assert config.cache_dir == tmp_path / "builds"
    config.cache_dir = "here"
    monkeypatch.chdir("/")
    assert config.cache_dir == tmp_path / "here"


def test_report_is_in_the_cache_unless_said_otherwise(config, tmp_path):
    assert config.snapshot().report_path == config.cache_dir / "tuning_report.json"
    config.tuning_data_output_path = tmp_path / "mine.json"
    assert config.snapshot().report_path == tmp_path / "mine.json"


def test_reset_gives_back_what_was_there_at_the_start(tmp_path):
    config = TuningConfig.of({"PERFLADDER_CACHE_DIR": str(tmp_path), "PERFLADDER_NVTX": "1"})
    at_start = config.snapshot()
    config.cache_dir, config.nvtx, config.min_num_samples = "/elsewhere", False, 7
    config.reset_to_defaults()
    assert config.snapshot() == at_start
    assert (config.cache_dir, config.nvtx, config.min_num_samples) == (tmp_path, True, 1)


def test_environment_variables_are_read():
    variables = {
        "PERFLADDER_CACHE_DIR": "/builds",
        "PERFLADDER_NVTX": "true",
        "PERFLADDER_HARDWARE_METRICS": "0",
        "PERFLADDER_TUNING_REPORT": "/reports/one.json",
        "XDG_CACHE_HOME": "/not/this",
    }
    assert read_environment(variables) == {
        "cache_dir": Path("/builds"),
        "nvtx": True,
        "hardware_metrics": False,
        "tuning_data_output_path": Path("/reports/one.json"),
    }
    assert TuningConfig.of(variables).cache_dir == Path("/builds")


def test_empty_variable_is_not_set():
    assert read_environment({"PERFLADDER_NVTX": "", "PERFLADDER_CACHE_DIR": ""}) == {}


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PERFLADDER_NVTX", "maybe", r"PERFLADDER_NVTX: expected 1, 0, true or false \(got 'maybe'\)"),
        ("PERFLADDER_HARDWARE_METRICS", "2", "PERFLADDER_HARDWARE_METRICS: expected 1"),
        ("PERFLADDER_CACHE_DIR", "~nobody-of-this-name/x", "PERFLADDER_CACHE_DIR: '~' stands for"),
    ],
)
def test_wrong_variable_is_named(variable, text, says):
    with pytest.raises(InputError, match=says):
        read_environment({variable: text})


def test_the_object_of_the_process_comes_from_its_environment(tmp_path):
    source = "from perfladder.tuning.config import config; print(config.cache_dir, config.nvtx)"

    def run(**variables):
        return subprocess.run(
            [sys.executable, "-c", source], env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )

    assert run(PERFLADDER_CACHE_DIR=str(tmp_path), PERFLADDER_NVTX="1").stdout == f"{tmp_path} True\n"
    assert "InputError: Environment variable PERFLADDER_NVTX" in run(PERFLADDER_NVTX="x").stderr


def test_cache_folder_follows_the_xdg_specification():
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/perfladder")
    assert cache_folder({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/perfladder")
    assert cache_folder({}) is None
    assert str(os.geteuid()) in str(default_cache_dir({}))


def test_private_folder_is_made_for_its_owner_alone(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(folder) == folder


def test_private_folder_may_be_a_link_to_a_folder_of_the_user(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert private_folder(tmp_path / "link") == tmp_path / "link"


def test_world_writable_folder_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NotPossibleHereError, match=r"Every user may write to .*chmod o-w"):
        private_folder(folder)


def test_folder_of_another_user_is_refused(tmp_path):
    if os.geteuid() == 0:
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
    else:
        folder = Path("/usr")
    with pytest.raises(NotPossibleHereError, match="belongs to another user"):
        private_folder(folder)


@pytest.mark.parametrize("below", ["", "below"])
def test_file_in_the_place_of_a_folder_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file(/below)? is no folder"):
        private_folder(tmp_path / "file" / below)
