"""How it is switched on: for a process, for a function, deferred, to inspect; and its settings."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder import jit
from perfladder.errors import InputError
from perfladder.jit import jit_config
from perfladder.jit.config import JitConfig, JitSettings
from perfladder.jit.finder import finder
from perfladder.jit.report import State


@pytest.fixture
def x():
    return torch.arange(8.0).reshape(2, 4)


@pytest.mark.usefixtures("faster")
class TestFunctions:
    def test_only_while_the_function_runs(self, x):
        plain_call, toy = nn.Module.__call__, toys.Toy()

        @jit.patch_for_jit_tuning
        def run():
            return toy(x), toy(x)

        run()
        assert toys.builds == {"faster": 1}
        assert nn.Module.__call__ is plain_call
        assert type(toy) is toys.Toy
        toys.calls.clear()
        toy(x)
        assert not toys.calls
        run()
        assert toys.calls == {"faster": 2}
        assert toys.builds == {"faster": 1}

    def test_everything_is_put_back_where_the_function_raises(self, x):
        plain_call = nn.Module.__call__

        @jit.patch_for_jit_tuning
        def run():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            run()
        assert nn.Module.__call__ is plain_call

    def test_coroutines_are_awaited_inside(self, x, states):
        @jit.patch_for_jit_tuning
        async def run():
            await asyncio.sleep(0)
            toys.Toy()(x)

        asyncio.run(run())
        assert states() == {"Toy": "tuned"}

    def test_generators_are_refused(self):
        def stream():
            yield 1

        with pytest.raises(InputError, match="generator function"):
            jit.patch_for_jit_tuning(stream)

    def test_what_cannot_be_called_is_refused(self):
        with pytest.raises(InputError, match="int cannot be called"):
            jit.patch_for_jit_tuning(3)


@pytest.mark.usefixtures("faster")
class TestDeferred:
    def test_nothing_is_tuned_before_it_is_asked_for(self, x, states):
        jit_config.mode = "tune_deferred"
        toy = toys.Toy()
        jit.enable()
        for _ in range(3):
            toy(x)
        assert states() == {"Toy": "recording"}
        jit.tune_deferred()
        toy(x)
        assert states() == {"Toy": "tuned"}

    def test_other_modes_refuse(self):
        with pytest.raises(InputError, match=r"jit_config\.mode is 'tune_eager'"):
            jit.tune_deferred()


class TestInspection:
    def test_modules_are_timed_and_stay_plain(self, x, tmp_path):
        model = nn.Sequential(toys.Toy(), nn.ModuleDict({"inner": toys.Toy()})["inner"])
        holder = toys.Toy()
        holder.part = model
        holder.compute = lambda x, scale: model(x)
        jit.enable_inspection()
        holder(x), holder(x)
        modules = {module.name: module for module in finder.report().modules}
        assert list(modules) == ["Toy", "Toy.part.0", "Toy.part.1"]
        assert [module.level for module in modules.values()] == [0, 1, 1]
        assert [module.num_calls for module in modules.values()] == [2, 2, 2]
        assert modules["Toy"].time_ms >= modules["Toy.part.0"].time_ms > 0
        assert type(holder) is toys.Toy
        assert jit_config.mode == "inspect"

    def test_the_report_is_one_page_that_escapes_names(self, x, tmp_path):
        jit.enable_inspection()
        toys.Toy()(x)
        jit.save_report(tmp_path / "report.html", model_name="<b>mine</b>")
        page = (tmp_path / "report.html").read_text()
        assert "<h1>&lt;b&gt;mine&lt;/b&gt;</h1>" in page
        assert "toys.Toy" in page
        assert "src=" not in page
        assert "href=" not in page

    def test_a_report_that_cannot_be_written_is_an_input_error(self, tmp_path):
        with pytest.raises(InputError, match="cannot be written"):
            jit.save_report(tmp_path / "missing" / "report.html")


class TestSettings:
    def test_defaults(self, tmp_path):
        config = JitConfig.of({"XDG_CACHE_HOME": str(tmp_path)})
        assert config.snapshot().model_dump(mode="json") == {
            "mode": "tune_eager",
            "dry_run": False,
            "device": None,
            "min_samples": 1,
            "batch_axis_required": False,
            "max_depth_level": 1,
            "min_parameters": 0,
            "max_num_graphs": 8,
            "detect_graph_breaks": False,
            "skip_modules": [],
            "patch_exclude": [],
            "cache_dir": str(tmp_path / "perfladder" / "jit"),
            "strategy": None,
        }

    def test_the_environment_gives_the_folder(self, tmp_path):
        assert JitConfig.of({"PERFLADDER_JIT_CACHE_DIR": str(tmp_path)}).cache_dir == tmp_path

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("mode", "tune", "mode: got 'tune'; accepted: 'tune_eager', 'tune_deferred' or 'inspect'"),
            ("min_samples", 0, "min_samples"),
            ("max_depth_level", -1, "max_depth_level"),
            ("min_parameters", True, "min_parameters"),
            ("dry_run", 1, "dry_run"),
            ("skip_modules", [3], "expected classes of modules, or names"),
            ("strategy", "fast", "expected a strategy, such as"),
            ("device", "the first", "device"),
            ("min_sample", 2, "Did you mean 'min_samples'"),
        ],
    )
    def test_wrong_values_name_the_field(self, name, value, message):
        config = JitConfig.of({})
        with pytest.raises(InputError, match="jit_config") as caught:
            setattr(config, name, value)
        assert message in str(caught.value)

    def test_reset(self):
        config = JitConfig.of({})
        config.min_samples, config.skip_modules = 4, [nn.Linear]
        config.strategy = pl.MaxThroughputStrategy()
        config.reset_to_defaults()
        assert config.snapshot() == JitConfig.of({}).snapshot()

    def test_a_snapshot_does_not_change(self):
        config = JitConfig.of({})
        snapshot = config.snapshot()
        config.min_samples = 9
        config.skip_modules.append(nn.Linear)
        assert (snapshot.min_samples, snapshot.skip_modules) == (1, [])
        assert type(snapshot) is JitSettings


class TestDefaultBackends:
    def test_none_keeps_a_copy_of_the_weights(self):
        from perfladder.jit.tuner import jit_backends

        found = jit_backends(nn.Sequential(nn.Conv2d(3, 3, 3)), "cpu")
        assert [repr(backend) for backend in found] == ["TorchInductorJitBackend()", "TorchEagerBackend()"]

    @pytest.mark.usefixtures("faster")
    def test_weights_that_are_loaded_later_are_used(self, x):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        toy.load_state_dict({"weight": torch.full((4,), 5.0)})
        with torch.no_grad():
            assert torch.equal(toy(x), x * 5)


def test_the_guide_has_all_settings_and_states():
    text = (Path(__file__).parents[2] / "docs" / "jit.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", text, flags=re.MULTILINE))
    assert set(JitSettings.model_fields) | set(get_args(State)) == documented


def test_the_settings_bring_no_torch():
    source = "import sys; from perfladder.jit import jit_config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
