import json
import os
import subprocess
import sys
import uuid

import kernel_toys as toys
import processes
import pytest
import torch
from torch import nn
from torch.nn import functional

from perfladder.errors import InputError, RungError
from perfladder.kernels import KernelGenerator, export_benchmark

X = torch.linspace(-1, 1, 12).view(3, 4)
RIGHT = "import torch\n\ndef kernel(x, **kwargs):\n    return torch.nn.functional.gelu(x, **kwargs)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the two forms of call that the toy network makes."""
    path = tmp_path_factory.mktemp("gelu") / "bench"
    result = export_benchmark(toys.Net(), [((X,), {}), ((X[:, :2],), {})], "gelu", path)
    assert result.num_calls == 4
    assert result.left_out is None
    return path


class TestExport:
    def test_the_folder_holds_the_inputs_and_what_is_right(self, folder):
        from safetensors.torch import load_file

        names = {path.name for path in folder.iterdir()}
        assert names == {"task.json", "samples.safetensors", "reference.safetensors", "bench.py", "candidate.py"}
        task = json.loads((folder / "task.json").read_text())
        assert [sample["num_calls"] for sample in task["samples"]] == [3, 1]
        first = task["samples"][0]["args"]["items"][0]
        inputs = load_file(folder / "samples.safetensors")[first["name"]]
        assert torch.equal(inputs.as_strided(first["shape"], first["strides"]), X[:, :2])
        right = load_file(folder / "reference.safetensors")[task["samples"][0]["output"]["name"]]
        torch.testing.assert_close(right.view(3, 2), functional.gelu(X[:, :2].double()).float())
        assert task["tolerances"]["float32"] == 1e-4
        assert task["samples"][0]["reference_dtype"] == "float64"

    def test_other_forms_than_the_most_frequent_may_be_left_out(self, tmp_path):
        result = export_benchmark(toys.Net(), [((X,), {}), ((X[:, :2],), {})], "gelu", tmp_path / "one", limit=1)
        assert result.samples == ["3 x float32 [3, 2] strides [4, 1]"]
        assert result.left_out == "more than 1 forms of call (limit)"

    def test_what_cannot_be_exported_is_told(self, tmp_path):
        with pytest.raises(RungError, match="The module makes no call of relu"):
            export_benchmark(toys.Net(), [((X,), {})], "relu", tmp_path / "none")
        with pytest.raises(InputError, match="There is no function 'gelo'"):
            export_benchmark(toys.Net(), [((X,), {})], "gelo", tmp_path / "wrong")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "a").touch()
        with pytest.raises(InputError, match="is there already"):
            export_benchmark(toys.Net(), [((X,), {})], "gelu", tmp_path / "full")

    def test_wrong_names_and_limits_are_told(self, tmp_path):
        with pytest.raises(InputError, match="limit: expected a whole number above 0, got 0"):
            export_benchmark(toys.Net(), [((X,), {})], "gelu", tmp_path / "none", limit=0)
        with pytest.raises(InputError, match=r"expected a name such as 'linear'.*not a NoneType"):
            export_benchmark(toys.Net(), [((X,), {})], None, tmp_path / "none")
        with pytest.raises(InputError) as told:
            export_benchmark(toys.Net(), [((X,), {})], "nope", tmp_path / "none")
        assert "has_torch_function" not in str(told.value)
        assert not (tmp_path / "none").exists()

    def test_a_value_that_no_file_holds_leaves_the_call_out(self, tmp_path):
        class Odd(nn.Module):
            def forward(self, x):
                return functional.gelu(x) + functional.layer_norm(x, normalized_shape=Sizes([4]))

        class Sizes(list):
            pass

        with pytest.raises(RungError, match="whose inputs can be written: the form of its arguments cannot be told"):
            export_benchmark(Odd(), [((X,), {})], "layer_norm", tmp_path / "odd")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: KernelGenerator(folder.parent), "has no task.json"),
        (lambda folder: KernelGenerator(folder, timeout_s=0), "timeout_s: expected seconds above 0"),
        (lambda folder: KernelGenerator(folder).submit(3), "source: expected Python code or the path of a file"),
        (lambda folder: KernelGenerator(folder).submit(folder / "none.py"), "source: there is no file"),
        (lambda folder: KernelGenerator(folder).submit("x = '\udce9'"), "source: expected text in UTF-8"),
        (lambda folder: KernelGenerator(folder, max_memory_bytes=-1), "max_memory_bytes: expected a number of bytes"),
    ],
)
def test_wrong_arguments_are_told(folder, make, says):
    with pytest.raises(InputError, match=says):
        make(folder)


def test_a_closed_generator_takes_no_more(folder):
    with KernelGenerator(folder) as generator:
        pass
    with pytest.raises(InputError, match="the generator is closed"):
        generator.submit(RIGHT)


def test_a_damaged_task_is_refused(tmp_path):
    (tmp_path / "task.json").write_text("{}")
    with pytest.raises(InputError, match=r"task.json is damaged"):
        KernelGenerator(tmp_path)


def standalone():
    from perfladder.kernels import standalone_bench

    return standalone_bench


class TestScript:
    """The script's own judgement, in this process."""

    @pytest.mark.parametrize(
        ("source", "stage", "says"),
        [
            (RIGHT, "benchmark", None),
            (RIGHT.replace("return ", "return 1.01 * "), "validation", "sample 0: largest error"),
            (
                RIGHT.replace("s)\n", "s).double()\n"),
                "validation",
                "the output is torch.float64 [3, 2]",
            ),
            (RIGHT.replace("    return", "    x = x.add_(1) - 1\n    return"), "validation", "the inputs afterwards"),
            (
                RIGHT.replace("    return", "    x.fill_(0.5) if x.shape[1] == 3 else None\n    return"),
                "validation",
                "sample 1",
            ),
            ("def kernel(x):\n    return [x]\n", "validation", "the output is a list with 1 tensors"),
            ("def kernel(x):\n    raise MemoryError('too much')\n", "validation", "MemoryError: too much"),
            ("def kernel(x:\n", "compile", "SyntaxError"),
            ("import no_such_module\n", "compile", "ModuleNotFoundError"),
            ("def other(x):\n    return x\n", "compile", "candidate.py has no function `kernel`"),
            ("raise SystemExit(3)\n", "compile", "SystemExit: 3"),
            ("def kernel(x):\n    return x * float('nan')\n", "validation", "NaN or infinite on one side only"),
        ],
    )
    def test_a_candidate_is_told_what_it_is(self, folder, tmp_path, monkeypatch, source, stage, says):
        bench = standalone()
        monkeypatch.setattr(bench, "PAIRS", 3)
        (tmp_path / "candidate.py").write_text(source)
        result = bench.evaluate(folder, tmp_path / "candidate.py")
        assert result["stage"] == stage
        assert (result["error"] is None) == (says is None)
        assert (says or "") in (result["error"] or "")
        json.dumps(result)

    def test_answers_learnt_by_heart_are_wrong(self, folder, tmp_path):
        """The right outputs for the samples, whatever the numbers."""
        source = (
            "from safetensors.torch import load_file\n"
            f"known = load_file({str(folder / 'reference.safetensors')!r})\n"
            "def kernel(x):\n"
            "    return next(t.view(x.shape) for t in known.values() if t.numel() == x.numel())\n"
        )
        (tmp_path / "candidate.py").write_text(source)
        result = standalone().evaluate(folder, tmp_path / "candidate.py")
        assert result["error"].startswith("sample 0: with other numbers: largest error")

    @pytest.mark.parametrize(
        ("source", "says"),
        [
            (
                "known = {}\ndef kernel(x):\n"
                "    return known.setdefault(x.data_ptr(), torch.nn.functional.gelu(x)).clone()\n",
                "sample 0: with other numbers: largest error",
            ),
            (
                "known = {}\ndef kernel(x):\n"
                "    return known.setdefault(x.shape, torch.empty_like(x)).copy_(torch.nn.functional.gelu(x))\n",
                "sample 0: the next call changes its output",
            ),
        ],
        ids=["by-address", "same-memory"],
    )
    def test_answers_that_are_kept_are_wrong(self, folder, tmp_path, source, says):
        (tmp_path / "candidate.py").write_text(f"import torch\n{source}")
        result = standalone().evaluate(folder, tmp_path / "candidate.py")
        assert (result["stage"], result["error"][: len(says)]) == ("validation", says)

    def test_functions_that_write_to_their_inputs_are_held_to_that(self, tmp_path, monkeypatch):
        class InPlace(nn.Module):
            def forward(self, x):
                return functional.relu(x + 0, inplace=True)

        export_benchmark(InPlace(), [((X,), {})], "relu", tmp_path / "bench")
        bench = standalone()
        monkeypatch.setattr(bench, "PAIRS", 3)
        for source, stage in (("x.clamp_(min=0)", "benchmark"), ("x.clamp(min=0)", "validation")):
            (tmp_path / "candidate.py").write_text(f"def kernel(x, inplace):\n    return {source}\n")
            result = bench.evaluate(tmp_path / "bench", tmp_path / "candidate.py")
            assert result["stage"] == stage, result["error"]


@pytest.mark.slow
class TestProcesses:
    @pytest.fixture
    def mark(self, monkeypatch):
        """All processes of the test carry it, and none is left when it ends."""
        value = uuid.uuid4().hex
        monkeypatch.setenv(processes.MARK, value)
        yield value
        processes.wait_until(lambda: not [pid for pid in processes.marked(value) if pid != os.getpid()], limit_s=10)

    def test_the_script_runs_by_itself(self, folder, tmp_path):
        command = [sys.executable, "-I", str(folder / "bench.py")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2
        assert "times as fast" in done.stdout

    def test_candidates_get_their_results_in_turn_and_leave_nothing(self, folder, mark):
        fork = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
        with KernelGenerator(folder, timeout_s=60) as generator:
            waiting = [
                generator.submit(source)
                for source in (fork + RIGHT, RIGHT.replace("return ", "return 2 * "), "import os\nos.abort()\n")
            ]
            right, wrong, crashed = [future.result() for future in waiting]
        assert (right.stage, right.error, right.is_right) == ("benchmark", None, True)
        assert right.speedup is not None
        assert all(sample.comparison is not None for sample in right.samples)
        assert (wrong.stage, wrong.is_right, wrong.speedup) == ("validation", False, None)
        assert wrong.samples[0].reason.startswith("largest error")
        assert crashed.stage == "compile"
        assert crashed.error.startswith("its process ended: killed by SIGABRT")

    def test_a_candidate_that_forks_or_answers_itself_costs_its_own_result_only(self, folder, mark):
        scribble = "for fd in range(3, 30):\n    try:\n        os.write(fd, b'{}')\n    except OSError:\n        pass\n"
        with KernelGenerator(folder, timeout_s=60) as generator:
            forked = generator.evaluate("import os\nos.fork()\n" + RIGHT)
            scribbled = generator.evaluate("import os\n" + scribble + RIGHT)
        assert (forked.stage, forked.error) == ("benchmark", None)
        assert (scribbled.stage, scribbled.error) == ("compile", "what its process answered cannot be read")

    def test_a_candidate_that_hangs_is_ended_with_all_that_it_started(self, folder, mark):
        start = "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        with KernelGenerator(folder, timeout_s=5) as generator:
            result = generator.evaluate(start + "time.sleep(600)\n")
        assert (result.stage, result.error) == ("compile", "it did not end within 5 s (timeout_s)")
