import pytest

from perfladder.errors import InputError
from perfladder.models import digest
from perfladder.workload import Fingerprints, load_workload, parse_workload

MINIMAL = {"name": "sd", "target": "pipe:build"}


def message_of(**fields):
    with pytest.raises(InputError) as caught:
        parse_workload({**MINIMAL, **fields})
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    def write_file(content: str | bytes):
        path = tmp_path / "work.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def test_a_minimal_workload_gets_safe_defaults():
    workload = parse_workload(MINIMAL)
    assert (workload.device, workload.metric, workload.stages) == ("auto", "latency_p50", "auto")
    assert (workload.warmup_runs, workload.measured_runs) == (3, 10)


def test_unknown_field_suggests_a_near_name_and_lists_all_fields():
    message = message_of(warmup_run=3)
    assert "warmup_run: unknown field. Did you mean 'warmup_runs'" in message
    assert all(name in message for name in ("attention_backend", "timeout_s", "target_args"))


def test_unknown_nested_field_is_named_with_its_path_and_its_own_fields():
    message = message_of(media={"frames_per_chunk": 8, "fsp": 16})
    assert "media.fsp: unknown field. Did you mean 'fps'?" in message
    assert "warmup_runs" not in message


def test_wrong_literal_lists_the_accepted_values():
    assert "dtype: got 'fp16'; accepted: 'float32', 'float16', 'bfloat16' or 'float64'." in message_of(dtype="fp16")
    assert "'peak_memory' or 'cold_start'" in message_of(metric="latency")


def test_every_wrong_field_is_named_in_one_message():
    message = message_of(seed=-1, measured_runs=0, inputz={})
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == ["seed", "measured_runs", "inputz"]


def test_missing_field_is_named():
    with pytest.raises(InputError, match="target: required, but not given"):
        parse_workload({"name": "sd"})


@pytest.mark.parametrize("target", ["pipe", "pipe:", ":build", "pipe:1x", "pipe:a.b"])
def test_target_without_a_factory_is_refused(target):
    message = message_of(target=target)
    assert f"target: expected 'module:factory' or 'file.py:factory' (got {target!r})" in message


def test_cadence_without_media_says_what_is_needed():
    message = message_of(metric="cadence_p95")
    assert "metric cadence_p95 needs 'media' (frames_per_chunk, fps)" in message
    assert "Value error" not in message
    assert "{'name'" not in message, "the whole workload is no help in the message"


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([], "stages: expected 'auto' or at least one call site"),
        (["unet", "unet"], "stages: a call site is listed twice"),
        (["unet", ""], "stages.1: String should have at least 1 character"),
        ("unet", "stages: got 'unet'; accepted: 'auto'"),
    ],
)
def test_wrong_stages_are_explained_without_the_schema_jargon(stages, expected):
    message = message_of(stages=stages)
    assert expected in message
    assert "literal[" not in message
    assert "constrained" not in message


def test_inputs_must_be_what_json_can_hold():
    import datetime

    assert "inputs.day" in message_of(inputs={"day": datetime.date(2026, 1, 2)})


def test_a_workload_cannot_be_changed():
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="frozen"):
        parse_workload(MINIMAL).seed = 1


def test_media_tells_how_long_a_chunk_plays():
    workload = parse_workload({**MINIMAL, "metric": "cadence_p95", "media": {"frames_per_chunk": 16, "fps": 32}})
    assert workload.media is not None
    assert workload.media.chunk_ms == 500.0


def test_file_is_read_with_its_folder_as_base(write):
    path = write("name: sd\ntarget: pipe.py:build\ninputs: {steps: 4}\n")
    file = load_workload(path)
    assert file.workload.inputs == {"steps": 4}
    assert file.base_dir == path.parent.resolve()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("name: sd\ntarget: p:b\nseed: 1\nseed: 2\n", "field 'seed' is given twice"),
        ("name: sd\ninputs: {a: 1, a: 2}\n", "field 'a' is given twice"),
        ("- name: sd\n", "must be a mapping of fields such as 'name' and 'target'; not list"),
        ("", "it is empty"),
        ("name: [sd\n", "is not valid YAML"),
        (b"name: \xff\xfe\n", "is not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("a: " + "[" * 3000, "is nested too deeply"),
    ],
)
def test_bad_file_is_one_message_with_the_path(write, content, expected):
    path = write(content)
    with pytest.raises(InputError) as caught:
        load_workload(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_absent_file_suggests_built_in_names():
    with pytest.raises(InputError, match=r"no built-in workload of that name. Did you mean 'diffusion'"):
        load_workload("difusion")


def test_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder; give a workload file"):
        load_workload(tmp_path)


def test_every_built_in_workload_is_valid():
    from perfladder.workloads import builtin_names

    assert {"diffusion", "embedding", "streaming"} <= set(builtin_names())
    for name in builtin_names():
        assert load_workload(name).workload.name == name


CHANGES = {
    "target": "other:build",
    "target_args": {"size": "big"},
    "call": "generate",
    "inputs": {"steps": 9},
    "scenarios": {"long": {"steps": 50}},
    "sweep": {"input": "steps", "values": [1, 2]},
    "seed": 7,
    "model": "another",
    "task": "text-to-image",
    "dtype": "bfloat16",
    "attention_backend": "flash",
    "compile": {"mode": "default"},
    "tuned": {"archive": "tuned.ait"},
    "device": "cpu",
    "nproc": 2,
    "metric": "throughput",
    "items_per_call": 4,
    "media": {"frames_per_chunk": 8, "fps": 16},
    "stages": ["unet"],
    "warmup_runs": 9,
    "measured_runs": 99,
    "launches": 5,
    "concurrency": [1, 2],
    "warmup_limit": 50,
    "require_idle_device": True,
    "name": "other",
    "timeout_s": 9,
    "budget": {"max_rung_time_s": 9},
}
WORK = {"target", "target_args", "call", "inputs", "scenarios", "sweep", "seed", "model", "task"}
CONFIGURATION = {"dtype", "attention_backend", "compile", "tuned", "device", "nproc"}
PROTOCOL = {"metric", "items_per_call", "media", "stages", "warmup_runs", "measured_runs", "launches", "concurrency"}
PROTOCOL |= {"warmup_limit", "require_idle_device"}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_lands_in_its_own_fingerprint(field):
    before = Fingerprints.of(parse_workload(MINIMAL))
    after = Fingerprints.of(parse_workload({**MINIMAL, field: CHANGES[field]}))
    changed = {
        n for n in ("work", "configuration", "protocol") if getattr(before, n).digest != getattr(after, n).digest
    }
    groups = {"work": WORK, "configuration": CONFIGURATION, "protocol": PROTOCOL}
    assert changed == {name for name, fields in groups.items() if field in fields}


def test_every_field_of_the_schema_was_considered():
    from perfladder.workload import Workload

    assert set(CHANGES) == set(Workload.model_fields)


def test_fingerprint_does_not_depend_on_the_order_of_keys():
    one = parse_workload({**MINIMAL, "inputs": {"a": 1, "b": {"x": 1, "y": 2}}, "seed": 3})
    two = parse_workload({"seed": 3, "inputs": {"b": {"y": 2, "x": 1}, "a": 1}, **MINIMAL})
    assert one.fingerprints == two.fingerprints


def test_fingerprint_names_the_fields_it_was_made_from():
    fingerprints = Fingerprints.of(parse_workload(MINIMAL), commit="abc", dirty=False)
    assert fingerprints.configuration.fields["commit"] == "abc"
    assert set(fingerprints.work.fields) == WORK


def test_digest_tells_lists_of_another_order_apart():
    assert digest([1, 2]) != digest([2, 1])
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


@pytest.mark.parametrize(
    "field", [{"timeout_s": float("inf")}, {"timeout_s": 3e6}, {"seed": 2**64}, {"measured_runs": 10**9}], ids=str
)
def test_numbers_beyond_reason_are_refused(field):
    with pytest.raises(InputError, match=f"{next(iter(field))}: "):
        parse_workload({"name": "n", "target": "m:f", **field})
