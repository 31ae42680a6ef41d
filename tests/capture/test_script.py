import ast
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perfladder.capturing import context, script, standalone, standalone_values
from perfladder.capturing.store import read_manifest
from perfladder.rungs import capture
from perfladder.rungs.capture import CaptureRequest
from perfladder.target import LoadedTarget

WITHOUT = ("perfladder", "pydantic", "safetensors", "msgspec", "prefect", "mlflow")
RUNNER = """
import runpy, sys
for name in {without!r}:
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

TARGET = """
    import dataclasses, random
    import torch
    from torch import nn

    @dataclasses.dataclass
    class Result:
        hidden: torch.Tensor
        extra: dict

    class Noisy(nn.Module):
        '''Draws, counts, changes its input, and returns nested values.'''
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.5)
            self.register_buffer("total", torch.zeros(4))
            self.calls = 0

        def forward(self, x, views, half, mask, generator):
            self.calls += 1
            noise = torch.randn(x.shape, generator=generator)
            hidden = self.drop(self.inner(x) + noise) * mask + random.random() + self.calls
            self.total += hidden.sum(0)
            x.add_(1)
            seen = views["same"].sum() + views["whole"].sum() + views["row"].sum()
            is_last = views["image"].is_contiguous(memory_format=torch.channels_last)
            assert views["same"].data_ptr() == views["whole"].data_ptr()
            assert views["row"].stride(0) == 0
            return Result(hidden, {"seen": (seen, [half * 2, is_last]), "image": views["image"] * 2, "nothing": None})

    class Scheduler:
        def __init__(self):
            self.index, self.history = 0, []

        def step(self, x):
            self.index += 1
            self.history.append(x.mean())
            return x / (1 + self.index) + sum(self.history)

    class Pipe:
        def __init__(self):
            self.noisy, self.scheduler = Noisy().train(), Scheduler()

        def __call__(self):
            generator = torch.Generator().manual_seed(3)
            self.scheduler.__init__()
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
            whole = torch.arange(6.0)
            views = {"whole": whole, "same": whole[:3], "row": torch.ones(1, 4).expand(5, 4),
                     "image": torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)}
            for _ in range(3):
                mask = torch.tensor([True, False, True, True])
                result = self.noisy(x, views, half=whole[3:].half(), mask=mask, generator=generator)
                x = self.scheduler.step(result.hidden)
            return x

    def build():
        return Pipe()

    def noisy():
        torch.manual_seed(0)
        return build().noisy
"""


def capture_of(tmp_path, file, stage, **request) -> Path:
    loaded = LoadedTarget(file.workload, file.base_dir)
    loaded.load()
    folder = tmp_path / "capture"
    result = capture.measure(loaded, CaptureRequest(stage=stage, folder=str(folder), reference_runs=2, **request))
    assert result.status == "done", result.reason
    assert result.artifacts["script"] == script.SCRIPT
    return folder


_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, write_target):
    """One capture of each stage, shared by the tests that leave it as it is."""
    made = {}
    for stage in ("noisy", "scheduler.step"):
        folder = tmp_path_factory.mktemp(stage)
        # A name of its own each time: a worker that gets tests of this file twice has imported the first ones.
        filename = f"of_script_{stage[:5]}_{next(_NUMBERS)}.py"
        file = write_target(folder, TARGET, seed=7, filename=filename)
        file = file._replace(workload=file.workload.model_copy(update={"target": f"{filename}:build"}))
        made[stage] = capture_of(folder, file, stage)
    return made


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the script in this process: exit code, output, errors."""

    def run(folder, *options):
        monkeypatch.setattr(sys, "argv", [str(folder / script.SCRIPT), *options])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def replay(run):
    def replay(folder, *options):
        code, out, errors = run(folder, "--json", "--repeats", "2", *options)
        assert code == 0, errors
        return json.loads(out)

    return replay


@pytest.fixture
def refused(run):
    def refused(folder, message, *options):
        code, out, errors = run(folder, *options)
        assert (code, out) == (2, "")
        assert message in errors

    return refused


def replay_alone(folder, without):
    """In a process of its own, that cannot import these."""
    command = [sys.executable, "-c", RUNNER.format(without=without), str(folder / script.SCRIPT)]
    command += ["--json", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copied(folder, tmp_path) -> Path:
    there = tmp_path / "copy"
    there.mkdir()
    for path in folder.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    return there


@pytest.mark.parametrize(("stage", "without"), [("noisy", (*WITHOUT, "numpy")), ("scheduler.step", WITHOUT)])
def test_replay_with_torch_alone_is_exact(folders, stage, without):
    report = replay_alone(folders[stage], without)
    assert (report["stage"], report["data"]) == (stage, "captured")
    assert [(call["call"], call["parity"], call["differences"]) for call in report["calls"]] == [
        (index, "exact", {}) for index in range(3)
    ]
    for call in report["calls"]:
        assert len(call["samples_ms"]) == 2
        assert call["ratio"] == pytest.approx(call["replayed_median_ms"] / call["in_pipeline_median_ms"])


def test_same_with_numpy(folders, replay):
    assert {call["parity"] for call in replay(folders["noisy"])["calls"]} == {"exact"}


def test_table_for_people_and_trace(folders, tmp_path, run):
    trace = tmp_path / "trace.json"
    code, out, errors = run(folders["noisy"], "--repeats", "1", "--calls", "0,2", "--profile", str(trace))
    assert code == 0, errors
    lines = out.splitlines()
    assert lines[0].startswith("noisy on cpu, torch ")
    assert [line.split()[0] for line in lines[1:]] == ["call", "0", "2"]
    assert all(line.endswith("  exact") for line in lines[2:])
    assert any(event.get("name") == "aten::linear" for event in json.loads(trace.read_text())["traceEvents"])


def test_another_stage_is_told_by_its_difference(folders, replay):
    target = next(path for path in folders["noisy"].parent.glob("*.py"))
    report = replay(folders["noisy"], "--factory", f"{target}:noisy", "--calls", "0")
    assert report["calls"][0]["parity"] == "different", "its weights were drawn with another seed"
    assert report["calls"][0]["max_abs_error"] > 0
    assert "largest error" in report["calls"][0]["differences"]["output.hidden"]
    assert "output.extra.seen.0" not in report["calls"][0]["differences"]


@pytest.mark.parametrize("stage", ["noisy", "scheduler.step"])
@pytest.mark.parametrize("has_file", [True, False])
def test_synthetic_data(folders, tmp_path, replay, stage, has_file):
    folder = copied(folders[stage], tmp_path)
    if not has_file:
        (folder / "tensors.safetensors").unlink()
    report = replay(folder, "--synthetic")
    assert report["data"] == "SYNTHETIC"
    assert [(call["parity"], call["max_abs_error"]) for call in report["calls"]] == [(None, None)] * 3


def damage(folder):
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")


def edit(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage, "is damaged: its SHA-256 sum"),
        (lambda folder: (folder / "tensors.safetensors").unlink(), "is missing; only --synthetic"),
        (lambda folder: (folder / "manifest.json").unlink(), "there is no manifest.json"),
        (edit("manifest.json", '"num_storages": ', '"num_storages": 9'), "is no safetensors file of this capture"),
        (edit("manifest.json", '"calls":', '"calls'), "manifest.json is damaged"),
        (edit("manifest.json", '"calls":', '"others":'), "it has no calls"),
        (edit("manifest.json", '"kind": "dict"', '"kind": "record", "type_name": "os.system"'), "os.system is unknown"),
        (edit("manifest.json", '"offset": 0', '"offset": 99999999'), "reaches outside its storage"),
        (edit(script.SCRIPT, "STAGE = 'noisy'", "STAGE = 'other'"), "a Pipe has no 'other'"),
        (edit(script.SCRIPT, "TARGET = 'of", "TARGET = 'no"), "is not there"),
        (edit(script.SCRIPT, ":build", ":gone"), "has no gone"),
    ],
)
def test_what_is_wrong_is_one_message(folders, tmp_path, refused, change, message):
    folder = copied(folders["noisy"], tmp_path)
    change(folder)
    refused(folder, message)


def test_calls_that_were_not_captured(folders, refused):
    refused(folders["noisy"], "there is no call 5; captured are 0, 1, 2", "--calls", "5")


def test_errors_of_the_stage_itself_go_through(folders, tmp_path, monkeypatch):
    failing = tmp_path / "failing.py"
    failing.write_text(
        "def build():\n    def stage(*args, **kwargs):\n        raise KeyError('mine')\n    return stage\n"
    )
    monkeypatch.setattr(sys, "argv", ["replay.py", "--factory", f"{failing}:build"])
    with pytest.raises(KeyError, match="mine"):
        runpy.run_path(str(folders["noisy"] / script.SCRIPT), run_name="__main__")


def test_object_that_no_factory_made_needs_one(wrap, tmp_path, refused, replay):
    folder = tmp_path / "capture"
    request = CaptureRequest(stage="", folder=str(folder), reference_runs=1)
    loaded = wrap(torch.nn.ReLU(), target="in_place:object", inputs={"input": {"$tensor": [2]}})
    assert capture.measure(loaded, request).status == "done"
    refused(folder, "give --factory")
    report = replay(folder, "--factory", "torch.nn:ReLU")
    assert report["calls"][0]["parity"] == "exact"


def test_redacted_capture_is_labelled_and_has_no_parity(tmp_path, write_target, replay):
    file = write_target(tmp_path, TARGET, filename="of_script_redacted.py", target="of_script_redacted.py:build")
    report = replay(capture_of(tmp_path, file, "noisy", redact=True))
    assert report["data"] == "REDACTED"
    assert {call["parity"] for call in report["calls"]} == {None}


REGISTERED = """
    import enum
    import torch
    from collections import OrderedDict, namedtuple
    from perfladder.capturing.types import register_capture_type

    Pair = register_capture_type(namedtuple("Pair", "left right"))

    @register_capture_type
    class Mode(enum.Enum):
        FAST = 1

    @register_capture_type
    class Plain:
        def __init__(self, value):
            self.value = value

    class Own:
        def __init__(self, value):
            self.value = value

    def own(state):
        return Own(state["value"])

    register_capture_type(Own, to_state=lambda v: {"value": v.value}, from_state=own)

    class Stage(torch.nn.Module):
        def forward(self, pair, mode, plain, own, ordered):
            assert mode is Mode.FAST and list(ordered) == [2, 1]
            top = torch.max(pair.left, 0)
            return Pair(top, mode), Plain(plain.value + own.value), OrderedDict(ordered), {3, 1}, float("nan"), 1 + 2j

    class Pipe:
        def __init__(self):
            self.stage = Stage()

        def __call__(self):
            one = torch.ones(3)
            return self.stage(Pair(one, None), Mode.FAST, Plain(one), Own(one), OrderedDict({2: one, 1: 0}))

    def build():
        return Pipe()
"""


def test_registered_classes_are_rebuilt_as_the_table_says(tmp_path, write_target, replay):
    file = write_target(tmp_path, REGISTERED, filename="of_script_types.py", target="of_script_types.py:build")
    folder = capture_of(tmp_path, file, "stage")
    forms = {name.rpartition(".")[2]: form for name, (_, _, form) in constants(folder)["CLASSES"].items()}
    assert forms == {
        "Pair": "fields",
        "Mode": "fields",
        "Plain": "attributes",
        "Own": "of_script_types:own",
        "OrderedDict": "call",
        "max": "call",
    }
    report = replay(folder)
    assert (report["calls"][0]["parity"], report["calls"][0]["differences"]) == ("exact", {})


LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class Pipe:
        def __init__(self):
            config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 num_key_value_heads=1, vocab_size=32, max_position_embeddings=32)
            self.model = LlamaForCausalLM(config).eval()

        def __call__(self):
            return self.model.generate(torch.arange(1, 5)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False,
                                       pad_token_id=0)

    def build():
        return Pipe()
"""


def test_cache_of_keys_and_values_is_rebuilt(tmp_path, write_target, replay):
    file = write_target(tmp_path, LLAMA, filename="of_script_llama.py", target="of_script_llama.py:build")
    folder = capture_of(tmp_path, file, "model")
    assert constants(folder)["CLASSES"]["transformers.cache_utils.DynamicCache"][2] == "attributes"
    report = replay(folder)
    assert [(call["parity"], call["differences"]) for call in report["calls"]] == [("exact", {})] * 3


@pytest.mark.slow
def test_built_in_diffusion_workload(tmp_path, replay):
    from perfladder.workload import load_workload

    folder = capture_of(tmp_path, load_workload("diffusion"), "unet")
    compile((folder / script.SCRIPT).read_text(), script.SCRIPT, "exec")
    report = replay(folder, "--calls", "0")
    assert report["calls"][0]["parity"] == "exact"
    (folder / "tensors.safetensors").unlink()
    assert replay(folder, "--synthetic")["data"] == "SYNTHETIC"


@pytest.mark.parametrize(
    ("only", "found"), [(["part.0"], "part.0"), (None, "part")], ids=["named", "every module of the pipeline"]
)
def test_modules_are_compiled_as_in_the_pipeline(monkeypatch, only, found):
    class Pipe:
        def __init__(self):
            self.part = torch.nn.Sequential(torch.nn.ReLU())

    monkeypatch.setattr(torch, "compile", lambda module, mode: torch.nn.ModuleDict({mode: module}))
    monkeypatch.setattr(standalone, "COMPILE", {"mode": "default", "only": only})
    pipe = standalone.compiled(Pipe())
    owner, function = standalone.follow(pipe, found)
    assert owner is function
    assert list(function) == ["default"]


ON_DEVICE = """
    import torch
    from torch import nn

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)

        def forward(self, x, generator):
            x += torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            return {"out": self.drop(self.inner(x)), "device": x.device}

    class Pipe:
        def __init__(self, device, dtype):
            self.stage = Stage().to(device, getattr(torch, dtype)).train()
            self.x = torch.ones(4, 64, device=device, dtype=getattr(torch, dtype))
            self.generator = torch.Generator(device)

        def __call__(self):
            self.generator.manual_seed(1)
            return [self.stage(self.x.clone(), self.generator) for _ in range(3)]

    def build(device, dtype):
        return Pipe(device, dtype)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("has_file", [True, False])
def test_on_a_device(tmp_path, write_target, replay, has_file):
    target = {"filename": "of_script_device.py", "target": "of_script_device.py:build"}
    file = write_target(tmp_path, ON_DEVICE, **target, device="cuda", dtype="float16")
    folder = capture_of(tmp_path, file, "stage")
    assert (constants(folder)["DEVICE"], constants(folder)["DTYPE"]) == ("cuda:0", "float16")
    if not has_file:
        (folder / "tensors.safetensors").unlink()
        assert replay(folder, "--synthetic")["data"] == "SYNTHETIC"
        return
    report = replay(folder, "--profile", str(tmp_path / "trace.json"))
    assert [(call["parity"], call["differences"]) for call in report["calls"]] == [("exact", {})] * 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def constants(folder) -> dict[str, object]:
    """What was filled in."""
    text = (folder / script.SCRIPT).read_text()
    block = text.partition("# [filled in for each capture]\n")[2].partition("# [end]\n")[0]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(block).body}


def test_every_constant_is_filled_in(folders):
    source = Path(standalone_values.__file__).read_text()
    block = source.partition("# [filled in for each capture]\n")[2].partition("# [end]\n")[0]
    found = constants(folders["noisy"])
    assert list(found) == [node.target.id for node in ast.parse(block).body]
    assert (found["STAGE"], found["SEED"], found["DEVICE"]) == ("noisy", 7, "cpu")
    (target,) = folders["noisy"].parent.glob("*.py")
    assert (found["TARGET_MODULE"], found["BASE_DIR"]) == (target.stem, str(target.parent))


def test_settings_are_those_of_a_capture():
    assert set(standalone.settings_table()) == set(context._settings())


def test_script_imports_torch_and_the_standard_library_only(folders):
    text = (folders["noisy"] / script.SCRIPT).read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree).startswith("Replay a captured stage with torch alone")
    assert "perfladder" not in text.replace(str(folders["noisy"].parent), "")
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve"}


def test_names_with_quotes_and_newlines_stay_literals(tmp_path, folders, make_workload):
    nasty = "x'\"\n# [end]\nraise SystemExit(9)"
    manifest = read_manifest(folders["noisy"]).model_copy(update={"stage": nasty})
    script.write_script(tmp_path, manifest, make_workload(target_args={nasty: nasty}), tmp_path)
    assert (constants(tmp_path)["STAGE"], constants(tmp_path)["TARGET_ARGS"]) == (nasty, {nasty: nasty})


def test_a_range_for_nvidias_tools_is_refused_on_a_cpu(folders, refused):
    refused(folders["noisy"], "ranges are for NVIDIA GPUs, and the device is cpu", "--nvtx")
    assert constants(folders["noisy"])["NVTX_RANGE"] == "replay_noisy"


def test_the_script_is_read_back_as_values_only(folders):
    values = script.read_constants(folders["noisy"])
    assert values == constants(folders["noisy"])
    assert script.nvtx_range("down(0).attn/x@y") == "replay_down_0__attn_x_y"
