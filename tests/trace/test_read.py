import contextlib
import gzip
import json
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from perfladder.errors import TraceError
from perfladder.trace import read
from perfladder.trace.model import ABSENT, Category, Trace
from perfladder.trace.warnings import WarningCode

DATA = Path(__file__).parents[1] / "data"


def codes(trace: Trace) -> set[WarningCode]:
    return {warning.code for warning in trace.warnings}


def message(trace: Trace, code: WarningCode) -> str:
    return next(warning.message for warning in trace.warnings if warning.code == code)


def event(index: int, **fields: object) -> dict[str, object]:
    base = {"ph": "X", "cat": "cpu_op", "name": f"op{index}", "pid": 1, "tid": 1, "ts": index * 10, "dur": 5.001}
    return base | fields


def write(path: Path, events: list[dict[str, object]], **header: object) -> Path:
    path.write_text(json.dumps(header | {"traceEvents": events}))
    return path


def write_raw(path: Path, *events: str, end: str = "]}") -> Path:
    path.write_text('{"traceEvents": [' + ", ".join(events) + end)
    return path


GOOD = '{"ph": "X", "cat": "cpu_op", "name": "good", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.25}'


def test_columns_hold_what_the_file_says(scene) -> None:
    scene.op("aten::mm", 10, 2.5, args={"External id": 7, "Sequence number": 3, "Fwd thread id": 2})
    scene.kernel("gemm", 20, 30, 9, stream=13, device=1, args={"External id": 7})
    scene.copy("Memcpy HtoD (Pageable -> Device)", 60, 1, 10, args={"bytes": 4096})
    trace = scene.trace()
    assert trace.names == ("aten::mm", "gemm", "Memcpy HtoD (Pageable -> Device)")
    assert trace.category.tolist() == [Category.CPU_OP, Category.KERNEL, Category.GPU_MEMCPY]
    assert trace.start_ns.tolist() == [10_001, 20_001, 60_001]
    assert trace.duration_ns.tolist() == [2_500, 30_000, 1_000]
    assert trace.external_id.tolist() == [7, 7, ABSENT]
    assert (trace.sequence[0], trace.forward_thread[0]) == (3, 2)
    assert trace.correlation.tolist() == [ABSENT, 9, 10]
    assert (trace.stream[1], trace.device[1], trace.num_bytes[2]) == (13, 1, 4096)
    assert [trace.pids[i] for i in trace.pid] == [100, 1, 0]
    assert trace.device_types == ("CPU", "CUDA")
    assert trace.warnings == ()


@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_chunks_and_compression_change_nothing(tmp_path, monkeypatch, chunk, name) -> None:
    monkeypatch.setattr(read, "_CHUNK_BYTES", chunk)
    text = json.dumps({"traceEvents": [event(i, args={"External id": i}) for i in range(200)], "traceName": "x"})
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    trace = Trace.read(path)
    assert [trace.names[i] for i in trace.name_id] == [f"op{i}" for i in range(200)]
    assert trace.external_id.tolist() == list(range(200))
    assert trace.warnings == ()


def test_nested_objects_in_arguments_do_not_mislead_the_cut(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(read, "_CHUNK_BYTES", 256)
    nested = {"list": [{"name": "a"}, {"name": "b"}, {"ph": "X", "ts": 0, "dur": 1}], "text": '}, {"ph": "X"'}
    trace = Trace.read(write(tmp_path / "a.json", [event(i, args=nested) for i in range(50)]))
    assert trace.num_events == 50
    assert trace.warnings == ()


def test_bare_list_and_trailing_comma_are_read(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"\ufeff [ {GOOD} ,\n{GOOD},\n ]")
    assert Trace.read(path).num_events == 2
    assert Trace.read(path).warnings == ()


def test_members_after_the_events_are_read(tmp_path) -> None:
    text = {"traceEvents": [event(1), event(2)], "distributedInfo": {"rank": 3, "world_size": 8, "backend": "nccl"}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(text | {"more": [{"name": "x"}, {"name": "y"}]}))
    trace = Trace.read(path)
    assert trace.distributed is not None
    assert (trace.distributed.rank, trace.distributed.world_size, trace.distributed.backend) == (3, 8, "nccl")
    assert trace.num_events == 2
    assert trace.warnings == ()


def test_rank_is_unknown_unless_the_file_says_it(tmp_path) -> None:
    assert Trace.read(write(tmp_path / "a.json", [event(1)])).distributed is None
    odd = write(tmp_path / "b.json", [event(1)], distributedInfo={"rank": "zero"}, deviceProperties="none")
    assert Trace.read(odd).distributed is None


def test_rank_is_found_in_an_invalid_header(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"x": un"quoted, "distributedInfo": {"rank": 2, "world_size": 4}, "traceEvents": [' + GOOD + "]}")
    trace = Trace.read(path)
    assert trace.distributed is not None
    assert trace.distributed.rank == 2
    assert codes(trace) == {WarningCode.UNREADABLE_HEADER}


def test_absolute_timestamps_keep_their_nanoseconds(tmp_path) -> None:
    first, second = "1700000000000000.123", "1700000000000000.124"
    events = [GOOD.replace("1.5", text) for text in (first, second)]
    trace = Trace.read(write_raw(tmp_path / "a.json", *events))
    assert trace.start_ns.tolist() == [1700000000000000123, 1700000000000000124]
    assert trace.duration_ns.tolist() == [2250, 2250]


@pytest.mark.parametrize("base", [0, 5_099_296_400_335, 8_796_093_022_206, 8_796_093_022_208, 1_700_000_000_000_000])
def test_every_nanosecond_is_exact(tmp_path, base) -> None:
    texts = [f"{base}.{step:03d}" for step in range(1000)]
    trace = Trace.read(write_raw(tmp_path / "a.json", *[GOOD.replace("1.5", text) for text in texts]))
    assert trace.start_ns.tolist() == [int(Decimal(text) * 1000) for text in texts]


def test_coarse_timestamps_are_named(tmp_path) -> None:
    events = [event(i, ts=1.7e15 + i * 10.25) for i in range(20)]
    trace = Trace.read(write(tmp_path / "a.json", events))
    assert trace.resolution_ns == 250
    assert codes(trace) == {WarningCode.COARSE_TIMESTAMPS}


def test_unfinished_events_are_dropped_and_counted(tmp_path) -> None:
    bad = [
        event(1, dur=-1),
        event(2, dur=None),
        event(3, dur=1.8e16),
        event(4, ts=9e11),
        event(5, dur=2, args={"finished": "false"}),
        {"ph": "X", "cat": "cpu_op", "name": "no duration", "pid": 1, "tid": 1, "ts": 3},
        {"ph": "X", "cat": "cpu_op", "name": "no start", "pid": 1, "tid": 1, "dur": 3},
    ]
    good = [event(i) for i in range(10, 30)]
    trace = Trace.read(write(tmp_path / "a.json", [*bad, *good]))
    assert trace.num_events == 20
    assert "7 unfinished" in message(trace, WarningCode.UNFINISHED_EVENTS)


def test_begin_and_end_pairs_become_spans(tmp_path) -> None:
    pairs = [
        event(0, ph="B", ts=1),
        event(1, ph="B", ts=2),
        event(1, ph="E", ts=5),
        event(0, ph="E", ts=9.5),
        event(7, ph="E", ts=20),
        event(8, ph="B", ts=30),
        event(9, ph="B", ts=2.5, tid=2),
        event(9, ph="E", ts=3.0, tid=2),
    ]
    trace = Trace.read(write(tmp_path / "a.json", pairs))
    spans = {trace.names[n]: (s, d) for n, s, d in zip(trace.name_id, trace.start_ns, trace.duration_ns, strict=True)}
    assert spans == {"op0": (1000, 8500), "op1": (2000, 3000), "op9": (2500, 500)}
    assert "2 unfinished" in message(trace, WarningCode.UNFINISHED_EVENTS)


def test_missing_fields_are_named(tmp_path) -> None:
    bare = {"ph": "X", "ts": 1, "dur": 2}
    trace = Trace.read(write(tmp_path / "a.json", [bare, event(1)]))
    assert trace.num_events == 2
    assert {WarningCode.MISSING_FIELDS} <= codes(trace)


def test_unknown_category_is_kept_and_named(tmp_path) -> None:
    trace = Trace.read(write(tmp_path / "a.json", [event(1, cat="martian"), event(2)]))
    assert trace.category.tolist() == [Category.OTHER, Category.CPU_OP]
    assert "martian" in message(trace, WarningCode.UNKNOWN_CATEGORY)


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("cuda_runtime", Category.RUNTIME),
        ("privateuse1_runtime", Category.RUNTIME),
        ("xpu_driver", Category.DRIVER),
        ("Kernel", Category.KERNEL),
        ("Memcpy", Category.GPU_MEMCPY),
        ("gpu_user_annotation", Category.GPU_ANNOTATION),
        ("cuda_sync", Category.SYNC),
        ("Operator", Category.CPU_OP),
    ],
)
def test_categories_of_all_ages_are_known(tmp_path, text, category) -> None:
    assert Trace.read(write(tmp_path / "a.json", [event(1, cat=text)])).category.tolist() == [category]


def test_root_span_is_the_window_and_no_event(tmp_path) -> None:
    root = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    trace = Trace.read(write(tmp_path / "a.json", [event(1), root | {"ts": 0, "dur": 100}]))
    assert trace.num_events == 1
    assert trace.window_ns == (0, 100_000)


DAMAGED = [
    GOOD.replace("good", 'unet["mid"]'),
    GOOD.replace("good", "C:\\temp\\x"),
    GOOD.replace("good", "bad \\u12 escape"),
    GOOD.replace("good", "line\nbreak"),
    GOOD.replace('"pid": 1', "pid: 1"),
    GOOD.replace('"tid": 1', '"tid": nan'),
    GOOD.replace('"dur": 2.25', '"dur": "2.25"'),
    GOOD.replace('"dur": 2.25', '"dur": 2.25, "args": {"correlation": "abc", "x": inf}'),
    GOOD.replace('"dur": 2.25', '"dur": 2.25, "args": {"External id": 99999999999999999999999}'),
]


@pytest.mark.parametrize("damaged", DAMAGED)
@pytest.mark.parametrize("place", [0, 1, 20])
def test_damaged_event_is_repaired_and_counted(tmp_path, damaged, place) -> None:
    events = [GOOD] * 20
    events.insert(place, damaged)
    trace = Trace.read(write_raw(tmp_path / "a.json", *events))
    assert trace.num_events == 21
    assert set(trace.start_ns.tolist()) == {1500}
    assert set(trace.duration_ns.tolist()) == {2250}
    assert message(trace, WarningCode.REPAIRED_EVENTS) == "1 events were repaired."
    assert codes(trace) - {WarningCode.MISSING_FIELDS} == {WarningCode.REPAIRED_EVENTS}


def test_repaired_name_is_as_written(tmp_path) -> None:
    trace = Trace.read(write_raw(tmp_path / "a.json", GOOD, DAMAGED[0]))
    assert trace.names == ("good", 'unet["mid"]')


def test_hopeless_event_is_skipped_and_counted(tmp_path) -> None:
    hopeless = '{"ph": "X", "name": "no time", "dur": nonsense, }'
    trace = Trace.read(write_raw(tmp_path / "a.json", GOOD, hopeless, GOOD))
    assert trace.num_events == 2
    assert "1 events" in message(trace, WarningCode.SKIPPED_EVENTS)


def test_missing_comma_between_events_is_repaired(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [' + "\n".join([GOOD] * 5) + "]}")
    trace = Trace.read(path)
    assert trace.num_events == 5


def test_invalid_utf8_is_repaired(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(
        b'{"traceEvents": [' + GOOD.encode() + b", " + GOOD.encode().replace(b"good", b"b\xff\xfed") + b"]}"
    )
    trace = Trace.read(path)
    assert trace.num_events == 2
    assert codes(trace) == {WarningCode.REPAIRED_EVENTS}


def test_every_truncation_keeps_the_whole_events_before_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(read, "_CHUNK_BYTES", 300)
    text = '{"schemaVersion": 1, "traceEvents": [' + ", ".join([GOOD] * 6) + '], "traceName": "x"}'
    path = tmp_path / "a.json"
    start = text.index(GOOD)
    for length in range(start + len(GOOD), text.index("]") + 1):
        path.write_text(text[:length])
        trace = Trace.read(path)
        whole = (length - start + 2) // (len(GOOD) + 2)
        assert trace.num_events == whole, length
        assert set(trace.duration_ns.tolist()) == {2250}
        ended = text[:length].endswith("]")
        assert codes(trace) == (set() if ended else {WarningCode.TRUNCATED_FILE}), length


def test_truncated_gzip_is_partial(tmp_path) -> None:
    text = json.dumps({"traceEvents": [event(i, name=f"op{i * 7919 % 10007}") for i in range(20_000)]})
    whole = gzip.compress(text.encode())
    path = tmp_path / "a.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    trace = Trace.read(path)
    assert 0 < trace.num_events < 20_000
    assert codes(trace) == {WarningCode.TRUNCATED_FILE}


def test_corrupt_gzip_is_partial_or_an_error(tmp_path) -> None:
    text = json.dumps({"traceEvents": [event(i, name=f"op{i * 7919 % 10007}") for i in range(20_000)]})
    whole = bytearray(gzip.compress(text.encode()))
    whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
    path = tmp_path / "a.json.gz"
    path.write_bytes(bytes(whole))
    with contextlib.suppress(TraceError):
        assert codes(Trace.read(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"   \n", "empty"),
        (b"hello", "neither JSON"),
        (b'{"a": 1}', "no 'traceEvents'"),
        (b'{"traceEvents": 5}', "no 'traceEvents'"),
        (b'{"traceEvents": []}', "no timed event"),
        (b"[1, 2, 3]", "no timed event"),
        (b"[]", "no timed event"),
        (b'"text"', "neither an object nor a list"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "neither JSON"),
        (b"PK\x03\x04 zip", "not with gzip"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]}', "no timed"),
        (b'{"traceEvents": [{"ph": "X", "na', "no timed event"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path, content, says) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says) as caught:
        Trace.read(path)
    assert str(path) in str(caught.value)


def test_no_file_and_folder_are_clear_errors(tmp_path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        Trace.read(tmp_path / "none.json")
    with pytest.raises(TraceError, match="folder"):
        Trace.read(tmp_path)


def test_several_processes_are_named(tmp_path) -> None:
    trace = Trace.read(write(tmp_path / "a.json", [event(1), event(2, pid=2)]))
    assert codes(trace) == {WarningCode.SEVERAL_PROCESSES}


def test_legacy_export_without_categories_holds_operators(tmp_path) -> None:
    rows = [{"name": "aten::add", "ph": "X", "ts": 1.0, "dur": 2.0, "tid": 1, "pid": "CPU functions", "args": {}}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    trace = Trace.read(path)
    assert trace.category.tolist() == [Category.CPU_OP]


def test_arguments_are_there_when_asked(tmp_path) -> None:
    path = write(tmp_path / "a.json", [event(1, args={"Input Dims": [[2, 3]], "External id": 4}), event(2)])
    trace = Trace.read(path, with_arguments=True)
    assert trace.arguments(0) == {"Input Dims": [[2, 3]], "External id": 4}
    assert trace.arguments(1) == {}
    assert trace.external_id.tolist() == [4, ABSENT]
    with pytest.raises(ValueError, match="with_arguments"):
        Trace.read(path).arguments(0)


def test_arguments_stay_aligned_beside_damage(tmp_path) -> None:
    events = [GOOD.replace('"dur": 2.25', f'"dur": 2.25, "args": {{"x": {i}}}') for i in range(5)]
    events.insert(2, DAMAGED[0])
    events.insert(0, GOOD.replace("2.25", "-1"))
    trace = Trace.read(write_raw(tmp_path / "a.json", *events), with_arguments=True)
    assert [trace.arguments(i) for i in range(6)] == [{"x": 0}, {"x": 1}, {}, {"x": 2}, {"x": 3}, {"x": 4}]


def test_names_are_in_file_order_whatever_the_hash_seed(tmp_path) -> None:
    trace = Trace.read(write(tmp_path / "a.json", [event(i) for i in range(50)]))
    assert trace.names == tuple(f"op{i}" for i in range(50))


def test_reading_imports_no_torch(tmp_path) -> None:
    path = write(tmp_path / "a.json", [event(1)])
    code = (
        "import sys\n"
        "from perfladder.trace import attribution, kernels, operators, regions, timeline\n"
        "from perfladder.trace.model import Trace\n"
        f"trace = Trace.read({str(path)!r})\n"
        "regions.report_regions(trace), operators.key_averages(trace), timeline.report_timeline(trace)\n"
        "assert 'torch' not in sys.modules and 'prefect' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_random_damage_never_ends_in_a_traceback(tmp_path) -> None:
    whole = (DATA / "cpu_small.json").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "a.json"
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(int(random.integers(1, 8))):
            place = int(random.integers(len(damaged)))
            match int(random.integers(4)):
                case 0:
                    damaged[place] = int(random.integers(256))
                case 1:
                    del damaged[place : place + int(random.integers(1, 400))]
                case 2:
                    damaged[place:place] = bytes(random.integers(0, 256, int(random.integers(1, 50)), dtype=np.uint8))
                case _:
                    damaged = damaged[: max(place, 1)]
        path.write_bytes(bytes(damaged))
        try:
            trace = Trace.read(path)
        except TraceError:
            continue
        assert (trace.duration_ns >= 0).all()


def test_damage_beside_nested_objects_loses_nothing(tmp_path, monkeypatch) -> None:
    nested = json.dumps({"list": [{"name": "a"}, {"ph": "X", "ts": 0, "dur": 1}, {"name": "b"}]})
    plain = GOOD.replace('"dur": 2.25', f'"dur": 2.25, "args": {nested}')
    events = [plain] * 40
    for place in (3, 4, 20, 41):
        events.insert(place, GOOD.replace("good", 'unet["mid"]'))
    path = write_raw(tmp_path / "a.json", *events)
    for chunk, window, scan in ((1 << 20, 1 << 17, 1 << 13), (1 << 20, 500, 100), (700, 300, 50)):
        monkeypatch.setattr(read, "_CHUNK_BYTES", chunk)
        monkeypatch.setattr(read, "_WINDOW_BYTES", window)
        monkeypatch.setattr(read, "_SCAN_BYTES", scan)
        trace = Trace.read(path)
        assert trace.num_events == 44, (chunk, window)
        assert message(trace, WarningCode.REPAIRED_EVENTS) == "4 events were repaired."
        assert codes(trace) == {WarningCode.REPAIRED_EVENTS}


def test_wrong_types_everywhere_are_read_leniently(tmp_path) -> None:
    events = [event(i, args={"correlation": str(i), "stream": "7"}, cat="kernel") for i in range(1, 300)]
    trace = Trace.read(write(tmp_path / "a.json", events))
    assert trace.correlation.tolist() == list(range(1, 300))
    assert set(trace.stream.tolist()) == {7}
    assert message(trace, WarningCode.REPAIRED_EVENTS) == "299 events were repaired."


def test_absolute_begin_and_end_pairs_are_exact(tmp_path) -> None:
    begin, end = (GOOD.replace('"X"', f'"{ph}"') for ph in "BE")
    texts = [begin.replace("1.5", "1700000000000000.123"), end.replace("1.5", "1700000000000007.125")]
    trace = Trace.read(write_raw(tmp_path / "a.json", *texts))
    assert (trace.start_ns.tolist(), trace.duration_ns.tolist()) == ([1700000000000000123], [7002])


def test_what_follows_the_list_is_not_lost_silently(tmp_path) -> None:
    whole = write_raw(tmp_path / "a.json", GOOD, GOOD).read_text()
    path = tmp_path / "b.json"
    path.write_text(whole + "\n" + whole)
    assert WarningCode.EVENTS_AFTER_END in codes(Trace.read(path))
    stray = write_raw(tmp_path / "c.json", GOOD, GOOD + "]", GOOD)
    assert WarningCode.EVENTS_AFTER_END in codes(Trace.read(stray))


def test_times_far_apart_do_not_overflow(tmp_path) -> None:
    """Ids are stored narrow, times never."""
    trace = Trace.read(write(tmp_path / "a.json", [event(i, ts=i * 1e9, dur=9e8, pid=i) for i in range(1, 80)]))
    assert trace.end_ns.tolist() == [int(i * 1e12 + 9e11) for i in range(1, 80)]


def test_many_names_processes_and_threads_stay_apart(tmp_path) -> None:
    events = [event(i, pid=i, tid=str(i)) for i in range(40_000)]
    trace = Trace.read(write(tmp_path / "a.json", events))
    assert [trace.names[i] for i in trace.name_id] == [f"op{i}" for i in range(40_000)]
    assert [trace.pids[i] for i in trace.pid] == list(range(40_000))
    assert (trace.forest.parent == -1).all()


def test_memory_is_bounded_by_columns_and_not_by_text(tmp_path) -> None:
    """R37: a trace of 20 MB in a process of its own."""
    path = tmp_path / "large.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for index in range(100_000):
            arguments = {
                "External id": index,
                "Record function id": 0,
                "Ev Idx": index,
                "Input Dims": [[2, 4, 8, 8]] * 3,
            }
            fields = {"ph": "X", "cat": "cpu_op", "name": f"aten::op{index % 50}", "pid": 1, "tid": 1}
            event = fields | {"ts": index * 2 + 0.001, "dur": 1.5, "args": arguments}
            file.write(("," if index else "") + json.dumps(event))
        file.write("]}")
    source = """
        import resource, sys
        from perfladder.trace.read import read_trace
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trace = read_trace(sys.argv[1])
        print(trace.num_events, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    num_events, grown_mb = map(int, done.stdout.split())
    assert path.stat().st_size > 20e6
    assert num_events == 100_000
    assert grown_mb < 20
