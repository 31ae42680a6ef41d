"""What a capture of a live object holds, and what a replay of it proves; in this process."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.capturing.decode import Decoder
from perfladder.capturing.encode import Encoder
from perfladder.capturing.evict import Evictor, _cpu_cache_bytes, last_cache_bytes
from perfladder.capturing.replay import Replay
from perfladder.capturing.side_effects import side_effects
from perfladder.capturing.store import read_manifest, read_storages
from perfladder.errors import CaptureError, InputError, NotPossibleHereError
from perfladder.in_place import wrap_object
from perfladder.rungs import harness
from perfladder.rungs.harness import HarnessRequest


class Pipe:
    """Calls a stage a few times."""

    def __init__(self, stage, calls=4):
        self.stage, self.calls = stage, calls

    def __call__(self, x=None, prompt="a secret"):
        x = torch.ones(2, 3) if x is None else x
        for _ in range(self.calls):
            x = self.use(x, prompt)
        return x

    def use(self, x, prompt):
        return self.stage(x)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "capture"


@pytest.fixture
def capture(folder):
    def run(pipe, stage="stage", **options):
        return pl.capture(pipe, stage, folder, **{"warmup_runs": 0, "reference_runs": 1, **options})

    return run


@pytest.fixture
def replay(folder):
    def run(pipe, **request):
        return harness.measure(wrap_object(pipe, None), HarnessRequest(folder=str(folder), repeats=2, **request))

    return run


class Plain(nn.Module):
    def forward(self, x):
        return x + 1


# Which calls


@pytest.mark.parametrize(
    ("calls", "expected"), [("default", [0, 2, 3]), ("all", [0, 1, 2, 3]), ([1], [1]), ([-1, 0], [0, 3])]
)
def test_calls_are_chosen(capture, calls, expected):
    assert capture(Pipe(Plain()), calls=calls).captured_calls == expected


def test_several_runs(capture, folder):
    assert capture(Pipe(Plain(), calls=2), runs=2).captured_calls == [0, 1, 0, 1]
    assert [(call.run, call.index) for call in read_manifest(folder).calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_call_that_is_not_there_and_folder_that_is_are_refused(capture, folder):
    with pytest.raises(InputError, match=r"calls: the stage is called 4 times a run, so there is no call 9"):
        capture(Pipe(Plain()), calls=[9])
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        capture(Pipe(Plain()))
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "options", [{"runs": 0}, {"max_bytes": -1}, {"calls": "some"}, {"calls": ["a"]}, {"calls": []}]
)
def test_wrong_options_name_their_field(capture, options):
    with pytest.raises(InputError, match=next(iter(options))):
        capture(Pipe(Plain()), **options)


# State


class Cached(nn.Module):
    """Keeps a list, a counter, a buffer and a flag; every call depends on all of them."""

    def __init__(self):
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.count = 0
        self.register_buffer("total", torch.zeros(3), persistent=False)
        self.inner = nn.Dropout(0.5)

    def forward(self, x):
        self.count += 1
        self.total += x.sum(0)
        self.seen.append(x)
        self.inner.train(self.count % 2 == 0)
        return self.inner(x + self.total + sum(self.seen)) * self.count


def test_state_of_a_module_is_captured_restored_and_checked(capture, replay, folder):
    result = capture(Pipe(Cached()), calls="all")
    assert result.changed_state == ["count", "inner.training", "seen", "total"]
    pipe = Pipe(Cached())
    found = replay(pipe)
    assert found.parity == "exact"
    assert not any(call.second_replay_differs for call in found.calls)
    assert (pipe.stage.count, pipe.stage.seen, pipe.stage.total.tolist()) == (0, [], [0, 0, 0]), "put back"


def test_state_that_a_call_leaves_otherwise_is_found(capture, replay):
    capture(Pipe(Cached()), calls=[1])

    class Forgetful(Cached):
        __qualname__ = Cached.__qualname__

        def forward(self, x):
            result = super().forward(x)
            self.total.zero_()
            return result

    Forgetful.__module__ = Cached.__module__
    found = replay(Pipe(Forgetful()))
    assert found.parity == "different"
    assert "state.total" in found.calls[0].parity.differing
    assert found.calls[0].parity.differing.keys() == {"state.total"}


def test_object_that_is_input_and_state_at_once_stays_one(capture, replay):
    class Keeps(nn.Module):
        def forward(self, bag):
            if not hasattr(self, "bag"):
                self.bag = bag
            self.bag.append(torch.ones(1))
            return torch.tensor(float(len(bag)))

    class Shares(Pipe):
        def __call__(self):
            bag = []
            self.stage.__dict__.pop("bag", None)
            return [self.stage(bag) for _ in range(3)]

    capture(Shares(Keeps()), calls="all")
    assert replay(Shares(Keeps())).parity == "exact"


def test_inputs_that_a_call_changes_are_compared_after_it(capture, replay):
    class InPlace(nn.Module):
        def forward(self, x):
            x.add_(1)

    class Uses(Pipe):
        def use(self, x, prompt):
            self.stage(x)
            return x

    assert capture(Uses(InPlace())).mutated_inputs == ["args.0"]
    assert replay(Uses(InPlace())).parity == "exact"

    class Other(nn.Module):
        __qualname__ = InPlace.__qualname__

        def forward(self, x):
            x.add_(2)

    found = replay(Uses(Other()))
    assert found.parity == "different"
    assert "args.0" in found.calls[0].parity.differing


def test_weights_that_a_call_changes_make_it_not_applicable(capture):
    class Learns(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            self.weight.add_(1)
            return super().forward(x)

    result = capture(Pipe(Learns(3, 3)))
    assert result.status == "not_applicable"
    assert "changes its own weights (weight; 1)" in result.reason


# Settings


def test_settings_of_torch_are_those_of_the_call(capture, replay, folder):
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.benchmark))
            return x

    class Sets(Pipe):
        def use(self, x, prompt):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return self.stage(x)

    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.benchmark
    capture(Sets(Looks()))
    assert read_manifest(folder).calls[0].context.settings["cuda.flash_sdp"] is False
    seen.clear()
    replay(Sets(Looks()))
    assert set(seen) == {(False, before[1])}
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.benchmark) == before


# The outside


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda path: path.write_text("x"), "writes a file"),
        (lambda path: os.open(path, os.O_WRONLY | os.O_CREAT), "writes a file"),
        (lambda path: subprocess.run(["true"], check=True), "starts a process"),
        (lambda path: (path.write_text("x"), path.unlink()), "removes a file"),
    ],
)
def test_side_effects_are_seen(tmp_path, act, what):
    with side_effects() as found:
        act(tmp_path / "out.txt")
    assert any(what in effect for effect in found)
    with side_effects() as found:
        (tmp_path / "in.txt").exists()
        open(os.devnull, "w").close()
    assert list(found) == []


def test_stage_that_writes_a_file_is_refused_unless_allowed(capture, replay, tmp_path):
    log = tmp_path / "log.txt"

    class Logs(nn.Module):
        def forward(self, x):
            with log.open("a") as file:
                file.write("called\n")
            return x

    result = capture(Pipe(Logs()))
    assert result.status == "not_applicable"
    assert f"writes a file ({log})" in result.reason
    assert result.side_effects == [f"writes a file ({log})"]
    assert capture(Pipe(Logs()), allow_side_effects=True).status == "done"
    assert replay(Pipe(Logs())).parity == "exact"


# Redacted and synthetic data


def test_redacted_capture_holds_nothing_of_the_user(capture, replay, folder):
    class Prompted(nn.Module):
        def forward(self, x, prompt):
            return x * 2 + len(prompt)

    class Uses(Pipe):
        def use(self, x, prompt):
            return self.stage(x, prompt=prompt)

    result = capture(Uses(Prompted()), redact=True, inputs={"x": torch.full((2, 3), 77.0)})
    assert result.is_redacted
    assert [warning.code for warning in result.warnings] == ["CAPTURE_REDACTED"]
    assert result.input_signature["kwargs.prompt"] == "text of 8 characters"
    manifest = read_manifest(folder)
    blocks = read_storages(folder, manifest)
    values = Decoder(blocks, manifest.storages).decode(manifest.calls[0].inputs)
    assert values["kwargs"] == {"prompt": "xxxxxxxx"}
    assert not (values["args"][0] == 77).any()
    everything = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"secret" not in everything
    found = replay(Uses(Prompted()))
    assert (found.data, found.parity) == ("redacted", None)
    assert found.is_faithful is not True
    assert "REPLAY_NOT_REAL_DATA" in {warning.code for warning in found.warnings}


def test_prompt_never_reaches_the_result(capture):
    class Prompted(nn.Module):
        def forward(self, prompt):
            return torch.ones(len(prompt))

    class Uses(Pipe):
        def use(self, x, prompt):
            return self.stage(prompt)

    assert "secret" not in capture(Uses(Prompted())).model_dump_json()


def test_synthetic_replay_is_called_so(capture, replay):
    capture(Pipe(Plain()))
    found = replay(Pipe(Plain()), synthetic=True)
    assert (found.data, found.parity) == ("synthetic", None)
    assert found.is_faithful is not True


# Short calls


def test_short_calls_are_timed_with_emptied_caches_too(capture, replay):
    capture(Pipe(Plain()))
    found = replay(Pipe(Plain()))
    assert all(len(call.evicted_ms.values) == 2 for call in found.calls)
    ratios = {"warm": found.warm_timing_ratio, "evicted": found.evicted_timing_ratio}
    assert found.timing_ratio == ratios[found.caches]
    assert abs(found.timing_ratio - 1) == min(abs(ratio - 1) for ratio in ratios.values())


def test_size_of_the_last_cache_is_read(tmp_path):
    for index, size in enumerate(["48K", "2048K", "32M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert _cpu_cache_bytes(tmp_path) == 32 << 20
    assert _cpu_cache_bytes(tmp_path / "nothing") == 64 << 20
    (host,) = Evictor(torch.device("cpu"))._memories
    assert (host.device.type, host.nbytes) == ("cpu", min(64 << 20, 2 * last_cache_bytes(torch.device("cpu"))))


@pytest.mark.gpu
def test_caches_of_the_host_are_emptied_beside_those_of_a_gpu():
    evictor = Evictor(torch.device("cuda"))
    assert [memory.device.type for memory in evictor._memories] == ["cuda", "cpu"]
    assert evictor.device_bytes == evictor._memories[0].nbytes > 32 << 20
    evictor.evict()
    assert all(memory.min() == memory.max() == 1 for memory in evictor._memories)


def test_stage_of_another_class_is_refused_by_its_name(capture, folder):
    capture(Pipe(Plain()))
    with pytest.raises(Exception, match=r"was captured from a .*Plain, but 'stage' is a .*Linear here"):
        Replay(wrap_object(Pipe(nn.Linear(3, 3)), None), folder)


# Models of transformers


def test_model_with_a_cache_of_keys_and_values_replays_every_step(capture, replay, folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        vocab_size=50,
        eos_token_id=None,
    )

    class Chat:
        def __init__(self):
            torch.manual_seed(0)
            self.model = transformers.LlamaForCausalLM(config).eval()

        def __call__(self):
            ids = torch.arange(6)[None]
            return self.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    result = capture(Chat(), "model", calls="all")
    assert (result.status, result.captured_calls) == ("done", [0, 1, 2, 3])
    assert any(path.endswith(".keys") for path in result.mutated_inputs), "the cache grows in place"
    lengths = [
        len(call.inputs["kwargs"].items[call.inputs["kwargs"].keys.index("input_ids")].tensor.size)
        for call in read_manifest(folder).calls
    ]
    assert lengths == [2, 2, 2, 2]
    found = replay(Chat())
    assert found.parity == "exact"
    assert not any(call.second_replay_differs for call in found.calls), "each replay begins with the cache as it was"


def test_arguments_given_by_keyword_are_captured_so(capture, folder):
    class Keywords(nn.Module):
        def forward(self, *, x, scale=2.0):
            return x * scale

    class Uses(Pipe):
        def use(self, x, prompt):
            return self.stage(x=x, scale=3.0)

    capture(Uses(Keywords()))
    inputs = read_manifest(folder).calls[0].inputs
    assert (inputs["args"].items, inputs["kwargs"].keys) == ([], ["x", "scale"])


# Odd cases


def test_call_that_raised_is_left_out_and_said(capture, folder):
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            if self.count % 4 == 2:
                raise ValueError("second")
            return x

    class Catches(Pipe):
        def use(self, x, prompt):
            try:
                return self.stage(x)
            except ValueError:
                return x

    result = capture(Catches(Moody()), calls="all")
    assert result.captured_calls == [0, 2, 3]
    assert [warning.code for warning in result.warnings] == ["CAPTURED_CALLS_RAISED"]
    none = pl.capture(Catches(Moody()), "stage", folder.with_name("none"), calls=[1], reference_runs=1, warmup_runs=0)
    assert none.status == "not_applicable"
    assert "the chosen calls raised" in none.reason
    assert not folder.with_name("none").exists()


def test_stage_that_returns_none_inside_an_error_handler_is_captured(capture):
    class Silent(nn.Module):
        def forward(self, x):
            return None

    class Handles(Pipe):
        def use(self, x, prompt):
            try:
                raise KeyError
            except KeyError:
                self.stage(x)
            return x

    assert capture(Handles(Silent())).captured_calls == [0, 2, 3]


def test_full_disk_leaves_nothing(capture, folder, monkeypatch):
    from perfladder.capturing import store

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_atomically", full)
    with pytest.raises(NotPossibleHereError, match=r"cannot be written to .*: No space left on device"):
        capture(Pipe(Plain()))
    assert not folder.exists()


def test_folder_that_cannot_be_made_is_found_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"folder: .* cannot be written to: Not a directory"):
        pl.capture(lambda: pytest.fail("it ran"), "stage", tmp_path / "file" / "capture")


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(100).to(torch.uint16),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ],
)
def test_every_dtype_can_be_redacted(value):
    encoder = Encoder(redact=True)
    nodes = encoder.encode({"x": value})
    back = Decoder(encoder.blocks, encoder.storages).decode(nodes)["x"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert not torch.equal(back.view(torch.uint8), value.view(torch.uint8)) or not value.view(torch.uint8).any()


def test_texts_as_keys_and_rows_of_numbers_are_redacted():
    encoder = Encoder(redact=True)
    nodes = encoder.encode({"x": {"a secret": [83, 69, 67, 82, 69, 84], "size": [64, 64]}})
    back = Decoder(encoder.blocks, encoder.storages).decode(nodes)["x"]
    first, size = back.values()
    assert "secret" not in "".join(back)
    assert (len(first), size) == (6, [64, 64])
    assert first != [83, 69, 67, 82, 69, 84]
    assert all(67 <= number <= 84 for number in first)


def test_value_that_raises_when_looked_at_is_named():
    class Hostile(dict):
        def keys(self):
            raise RuntimeError("no")

        __iter__ = items = keys

    encoder = Encoder()
    encoder.encode({"x": [Hostile(a=1), np.ones(2, dtype=">f8")]})
    assert set(encoder.unsupported) == {"x.0", "x.1"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m["calls"][0].update(inputs={}), "are no args and kwargs"),
        (lambda m: m["calls"][0].update(rng={}), "generators cannot be restored"),
        (lambda m: m["calls"][0].update(in_pipeline_ms=[-1.0]), "is damaged"),
        (lambda m: m["calls"][0]["context"].update(autocast_dtype="load"), "autocast_dtype 'load' is no dtype"),
        (lambda m: m["calls"][0]["context"]["settings"].update(num_threads=0), "num_threads cannot be 0"),
        (
            lambda m: m.update(owner_state={"training": {"kind": "list", "label": 3, "items": [_same(3)]}}),
            "holds itself",
        ),
    ],
)
def test_edited_manifests_are_called_damaged(capture, replay, folder, change, match):
    capture(Pipe(Plain()))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match=match):
        replay(Pipe(Plain()))


def _same(label):
    return {"kind": "same", "value": label}


def test_calls_are_checked(capture):
    with pytest.raises(InputError, match="there is no call -99"):
        capture(Pipe(Plain()), calls=[-99])
    with pytest.raises(InputError, match="calls: expected 'default', 'all', or indices"):
        capture(Pipe(Plain()), calls=3)
    with pytest.raises(InputError, match="calls"):
        capture(Pipe(Plain()), calls=[True])
