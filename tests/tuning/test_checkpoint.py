"""Saving tuned modules and loading them into freshly built objects."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.backend import Backend, BuildRequest, TorchEagerBackend, register_backend
from perfladder.errors import ArchiveError, InputError
from perfladder.tuning import cache, checkpoint_load
from perfladder.tuning.archive_names import find_archive
from perfladder.tuning.archive_write import write_archive
from perfladder.tuning.checkpoint_load import list_modules
from perfladder.tuning.module import control_of


class Block(nn.Module):
    """A convolution whose weight is tied to another's, with state that is no parameter."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(3, channels, 3, padding=1)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x)) * scale


class Pipe:
    """Two modules and something else."""

    def __init__(self, seed: int, channels: int = 4) -> None:
        torch.manual_seed(seed)
        self.block = Block(channels).eval()
        self.again = self.block
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, 5)).eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(x, scale=0.5))


class Writing(Backend):
    """Writes a file while it builds, and reads it when it is loaded."""

    name = "test_writing"
    is_isolated = False

    def compile(self, request: BuildRequest):
        (request.folder / "inner").mkdir(exist_ok=True)
        (request.folder / "inner" / "factor.txt").write_text("1.0")
        return request.forward

    def load(self, request: BuildRequest):
        factor = float((request.folder / "inner" / "factor.txt").read_text())
        return lambda *args, **kwargs: request.forward(*args, **kwargs) * factor


class WritingCode(Writing):
    name = "test_writing_code"
    writes_code = True


class Bound(Writing):
    name = "test_bound"

    @property
    def is_portable(self) -> bool:
        return False


class Needing(Bound):
    name = "test_needing"
    libraries = ("a-compiler",)


for _kind in (Writing, WritingCode, Bound, Needing):
    register_backend(_kind)

SAMPLES = [torch.linspace(-1, 1, 3 * 64).reshape(3, 8, 8) * factor for factor in (1.0, 0.5)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(pl.config, "cache_dir", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def strategy(backend: Backend) -> pl.OneBackendStrategy:
    return pl.OneBackendStrategy(backend).enable_performance_validation(False)


def tuned(backend: Backend, seed: int = 0) -> Pipe:
    pipe = pl.wrap(Pipe(seed), ["block", "head"], strategy=strategy(backend))
    report = pl.tune(pipe, SAMPLES)
    assert all(module.error is None for module in report.modules), report.describe()
    return pipe


CALL = torch.stack(SAMPLES)


def test_a_fresh_object_gets_weights_and_what_was_chosen():
    pipe = tuned(TorchEagerBackend(memory_format="channels_last"))
    path = pl.save(pipe, "pipe.ait")
    assert path == Path("checkpoints/pipe.ait")
    assert Path("checkpoints/pipe_sha256_sums.txt").is_file()
    other = pl.load(Pipe(1), "pipe.ait")
    assert torch.equal(other(CALL), pipe(CALL))
    assert other.again is other.block
    assert control_of(other.block).state == "tuned"
    assert not other.block.num_unseen_calls
    assert control_of(other.block).chosen[0].backend.config.memory_format == "channels_last"
    assert other.block.first.weight is other.block.second.weight


def test_a_name_is_looked_for_as_it_is_and_then_where_save_writes_it(caplog):
    path = pl.save(tuned(TorchEagerBackend()), "pipe")
    assert list_modules("pipe.ait") == list_modules("pipe") == ["block", "head"]
    here = path.rename("pipe.ait")  # where the command line writes it
    assert find_archive("pipe") == find_archive("./pipe.ait") == here
    assert isinstance(pl.load(Pipe(1), "pipe.ait").block, pl.Module)
    assert not caplog.records
    shutil.copy(here, path)
    assert find_archive("pipe.ait") == here
    assert f"{here} is loaded, and {path} is not" in caplog.text
    assert find_archive(path) == path


def test_a_missing_archive_is_told_with_every_place(tmp_path):
    here, there = tmp_path / "no.ait", tmp_path / "checkpoints" / "no.ait"
    with pytest.raises(ArchiveError, match=f"path: there is no archive 'no': neither {here} nor {there} is a file"):
        pl.load(Pipe(1), "no")
    for name in ("./no.ait", tmp_path / "no.ait"):
        with pytest.raises(ArchiveError, match=f"path: there is no archive .*: {here} is no file"):
            pl.load(Pipe(1), name)


def test_what_was_measured_comes_along():
    pipe = tuned(TorchEagerBackend(memory_format="channels_last"))
    other = pl.load(Pipe(1), pl.save(pipe, "pipe.ait").absolute())
    before, after = (control_of(one.block).chosen[0].record for one in (pipe, other))
    logs = [candidate.log_file for candidate in before.candidates]
    assert [candidate.log_file for candidate in after.candidates] == [None], "logs stay where they are"
    assert Path(logs[0]).is_file()
    without_logs = {"candidates": {"__all__": {"log_file"}}}
    assert before.model_dump(exclude=without_logs) == after.model_dump(exclude=without_logs)
    assert after.candidates[0].correctness.num_cases > 0


def test_a_module_by_itself_becomes_its_wrapper():
    torch.manual_seed(0)
    wrapper = pl.Module(Block().eval(), strategy=strategy(TorchEagerBackend(memory_format="channels_last")))
    pl.tune(wrapper, SAMPLES)
    pl.save(wrapper, "block")
    torch.manual_seed(1)
    other = pl.load(Block().eval(), "block.ait")
    assert isinstance(other, pl.Module)
    assert torch.equal(other(CALL), wrapper(CALL))


def test_files_of_a_build_come_along():
    pipe = tuned(Writing())
    pl.save(pipe, "pipe.ait")
    with zipfile.ZipFile("checkpoints/pipe.ait") as archive:
        assert "0/0/inner/factor.txt" in archive.namelist()
    assert torch.equal(pl.load(Pipe(1), "pipe.ait")(CALL), pipe(CALL))


def test_files_that_are_code_need_trust():
    pl.save(tuned(WritingCode()), "pipe.ait")
    fresh = Pipe(1)
    with pytest.raises(ArchiveError, match="trust=True"):
        pl.load(fresh, "pipe.ait")
    assert not isinstance(fresh.block, pl.Module)
    assert isinstance(pl.load(fresh, "pipe.ait", trust=True).block, pl.Module)


def test_another_environment_is_refused_by_name_or_built_again(monkeypatch, caplog):
    pl.save(tuned(Bound()), "bound.ait")
    pl.save(tuned(Writing()), "portable.ait")
    here = cache.versions()
    monkeypatch.setattr(checkpoint_load, "versions", lambda libraries: {**here, "torch": "9.9"})
    with pytest.raises(ArchiveError, match=r"torch .* there, 9\.9 here"):
        pl.load(Pipe(1), "bound.ait")
    with caplog.at_level("WARNING", logger="perfladder.tuning"):
        pl.load(Pipe(1), "portable.ait")
    assert "built again here" in caplog.text


def test_another_version_of_the_library_of_a_backend_is_another_environment(monkeypatch):
    known = cache.version_of
    monkeypatch.setattr(cache, "version_of", lambda name: "1.0" if name == "a-compiler" else known(name))
    pl.save(tuned(Needing()), "needs.ait")
    pl.load(Pipe(1), "needs.ait")
    monkeypatch.setattr(cache, "version_of", lambda name: "1.1" if name == "a-compiler" else known(name))
    with pytest.raises(ArchiveError, match=r"another environment \(a-compiler 1\.0 there, 1\.1 here\)"):
        pl.load(Pipe(1), "needs.ait")


def test_part_of_an_archive():
    pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    fresh = Pipe(1)
    before = fresh.head[1].weight.clone()
    pl.load(fresh, "pipe.ait", modules=["block"], device_map={"block": "cpu"})
    assert isinstance(fresh.block, pl.Module)
    assert not isinstance(fresh.head, pl.Module)
    assert torch.equal(fresh.head[1].weight, before)


@pytest.mark.parametrize("options", [{"modules": ["blok"]}, {"device_map": {"blok": "cpu"}}])
def test_unknown_modules_are_named(options):
    pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    with pytest.raises(InputError, match=r"'blok' is not in the archive.*block"):
        pl.load(Pipe(1), "pipe.ait", **options)


def test_another_object_is_refused_and_left_as_it_was():
    pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    other = Pipe(1, channels=6)
    before = other.block.first.weight.clone()
    with pytest.raises(ArchiveError, match=r"block\.first\.\w+ is float32 \[4.* there, and float32 \[6"):
        pl.load(other, "pipe.ait")
    assert torch.equal(other.block.first.weight, before)
    other = Pipe(1)
    other.block = other.again = nn.Identity()
    with pytest.raises(ArchiveError, match=r"block is a .*Block, but here is a .*Identity"):
        pl.load(other, "pipe.ait")
    del other.block
    with pytest.raises(ArchiveError, match="has no 'block'"):
        pl.load(other, "pipe.ait")
    half = Pipe(1)
    half.block.half()
    with pytest.raises(ArchiveError, match=r"is float32 .* there, and float16"):
        pl.load(half, "pipe.ait")


def test_a_backend_that_is_not_known_here_is_named(tmp_path):
    path = pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    _rewrite(path, tmp_path / "new.ait", lambda manifest: manifest["modules"][0]["choices"][0].update(backend="nobody"))
    with pytest.raises(InputError, match="no backend 'nobody'"):
        pl.load(Pipe(1), tmp_path / "new.ait")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["modules"][0]["choices"][0].update(graph="7"), "no graph '7'"),
        (lambda m: m["modules"][0]["choices"][0].update(config={"memory_format": "other"}), "not valid here"),
        (lambda m: m["modules"][0].update(same_tensors={"second.weight": "nowhere"}), "weights of"),
        (lambda m: m["modules"][0].update(extra=1), "extra"),
        (lambda m: m.update(format_version=99), "newer perfladder"),
    ],
)
def test_a_manifest_that_was_made_to_be_wrong_is_refused(tmp_path, change, told):
    path = pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    _rewrite(path, tmp_path / "new.ait", change)
    fresh = Pipe(1)
    with pytest.raises(ArchiveError, match=told):
        pl.load(fresh, tmp_path / "new.ait")
    assert not isinstance(fresh.block, pl.Module)


def test_a_tampered_archive_is_refused():
    path = pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArchiveError):
        pl.load(Pipe(1), "pipe.ait")


def test_weights_are_no_pickle():
    path = pl.save(tuned(TorchEagerBackend(memory_format="channels_last")), "pipe.ait")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            assert archive.read(name)[:2] != b"\x80\x04", name
            assert Path(name).suffix in {".json", ".safetensors", ".txt"}


def test_nothing_tuned_is_an_error():
    with pytest.raises(InputError, match="no tuned module"):
        pl.save(Pipe(0), "pipe.ait")
    with pytest.raises(InputError, match="no tuned module"):
        pl.save(pl.wrap(Pipe(0), ["block"]), "pipe.ait")


def test_originals_that_were_given_up_cannot_be_saved(monkeypatch):
    monkeypatch.setattr(pl.config, "device_after_tuning", "meta")
    pipe = tuned(TorchEagerBackend(memory_format="channels_last"))
    with pytest.raises(InputError, match="device_after_tuning"):
        pl.save(pipe, "pipe.ait")


@pytest.mark.parametrize(("path", "told"), [("", "name of an archive"), ("tuned.zip", r"ends in \.zip")])
def test_paths_that_are_none(path, told):
    with pytest.raises(InputError, match=told):
        pl.save(tuned(Writing()), path)


PIPELINE = """
import sys
import numpy as np
import torch
import perfladder as pl
from perfladder.backend import TorchEagerBackend
from perfladder.workloads import diffusion

mode, folder, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(seed)
torch.set_num_threads(1)
pl.config.cache_dir = folder + "/cache-" + mode
pipe = diffusion.build(size="tiny")
pipe.set_progress_bar_config(disable=True)
if seed:
    for module in (pipe.unet, pipe.vae, pipe.text_encoder):
        for weight in module.parameters():
            weight.data.mul_(0.5)

def call(prompt):
    torch.manual_seed(3)
    return pipe(prompt=prompt, num_inference_steps=2, height=64, width=64, output_type="np").images

if mode == "save":
    backend = TorchEagerBackend(memory_format="channels_last")
    strategy = pl.OneBackendStrategy(backend).enable_performance_validation(False)
    modules = pl.inspect(pipe, [{"prompt": "a"}], call, number_of_iterations=1, warmup_iterations=1).get_modules()
    pl.wrap(pipe, modules, strategy=strategy)
    report = pl.tune(call, [{"prompt": "a lighthouse"}])
    assert all(module.error is None for module in report.modules), report.describe()
    pl.save(pipe, folder + "/pipe.ait")
else:
    pl.load(pipe, folder + "/pipe.ait")
    assert not pipe.unet.num_unseen_calls
np.save(folder + f"/{mode}.npy", call("a lighthouse"))
"""


@pytest.mark.slow
def test_a_diffusion_pipeline_in_a_second_process_gives_the_same_picture(tmp_path):
    import numpy as np

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PIPELINE))
    for mode, seed in (("save", "0"), ("load", "1")):
        command = [sys.executable, "-W", "ignore", str(script), mode, str(tmp_path), seed]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "save.npy"), np.load(tmp_path / "load.npy"))


def _rewrite(path: Path, target: Path, change) -> None:
    """The same archive with another manifest and right sums, as somebody could make it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("_sums.txt")}
    manifest = json.loads(members.pop("manifest.json"))
    change(manifest)
    if manifest["format_version"] == 1:
        write_archive(target, members, json.dumps(manifest).encode())
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfladder.tuning.archive_write.FORMAT_VERSION", manifest["format_version"])
        write_archive(target, members, json.dumps(manifest).encode())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modules": "block"}, r"modules: expected a list of paths, such as \['block'\]"),
        ({"device_map": "cuda"}, "device_map: expected devices by path of module"),
        ({"device_map": {"block": "gpu"}}, "device_map: 'gpu' for 'block' is no device"),
    ],
)
def test_wrong_options_of_load_are_told(tmp_path, options, says):
    pipe = Pipe(0)
    strategy = pl.OneBackendStrategy(Writing()).enable_performance_validation(False)
    pl.wrap(pipe, ["block"], strategy=strategy)
    pl.tune(pipe, [torch.rand(3, 8, 8)])
    pl.save(pipe, tmp_path / "tuned.ait")
    with pytest.raises(InputError, match=says):
        pl.load(Pipe(1), tmp_path / "tuned.ait", **options)


@pytest.mark.parametrize("name", [3, b"tuned.ait", "a\nb.ait", "\x1b[31m.ait"])
def test_names_that_no_archive_can_have_are_told(name):
    with pytest.raises(InputError, match="path: "):
        pl.save(Pipe(0), name)
