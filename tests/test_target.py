import asyncio
import signal

import pytest
import torch

from perfladder.errors import InputError, NotPossibleHereError, WorkloadError
from perfladder.target import LoadedTarget, make_tensor, resolve_device
from perfladder.user_code import find_callable

ADDER = """
    class Adder:
        def __call__(self, x=1, y=2):
            return x + y

        def scaled(self, factor):
            return 3 * factor

    def build(offset=0):
        return Adder()

    def twice(obj, x):
        return 2 * obj(x=x)
"""
CPU = torch.device("cpu")


# Factories


def test_target_in_a_file_is_built_and_called(load_target):
    assert load_target(ADDER, inputs={"x": 5}).run().value == 7


def test_target_in_a_module_is_found_from_the_workloads_folder(load_target):
    assert load_target(ADDER, target="pipe:build").run().value == 3


@pytest.mark.parametrize("filename", ["types.py", "json.py", "profile.py", "torch.py", "my-pipe.v2.py"])
def test_file_named_like_another_module_hides_none(filename, tmp_path, write_target):
    import sys

    before = sys.modules.get("json"), sys.modules.get("types"), sys.modules["torch"]
    file = write_target(tmp_path, ADDER, filename=filename)
    loaded = LoadedTarget(file.workload, file.base_dir)
    loaded.load()
    assert loaded.run().value == 3
    assert (sys.modules.get("json"), sys.modules.get("types"), sys.modules["torch"]) == before
    assert "Adder" not in vars(sys.modules.get("profile", pytest))


def test_file_is_imported_once_over_preload_load_and_call(tmp_path, write_target):
    source = (
        ADDER
        + """
    from pathlib import Path
    with open(Path(__file__).with_name("count"), "a") as file:
        file.write("x")
    """
    )
    file = write_target(tmp_path, source, call="pipe.py:twice", inputs={"x": 1})
    loaded = LoadedTarget(file.workload, file.base_dir)
    loaded.preload()
    loaded.load()
    assert loaded.run().value == 6
    assert (tmp_path / "count").read_text() == "x"


def test_class_of_a_module_is_a_factory(load_target):
    loaded = load_target(
        """
        import torch
        class Net(torch.nn.Module):
            def __init__(self, width):
                super().__init__()
                self.inner = torch.nn.Linear(width, 2)
            def forward(self, x):
                return self.inner(x)
        """,
        target="pipe.py:Net",
        target_args={"width": 3},
        inputs={"x": {"$tensor": [1, 3]}},
    )
    assert list(loaded.run().value.shape) == [1, 2]
    info = loaded.info({})
    assert (info.num_parameters, info.dtypes, info.target_type) == (8, ["float32"], "pipe.Net")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("absent.py:build", "target: there is no file"),
        ("absent_module:build", "target: there is no module 'absent_module'"),
        ("absent.inner:build", "target: there is no module 'absent.inner'"),
        (".relative:build", "target: there is no module '.relative'"),
        ("pipe.py:biuld", "has no 'biuld'. Did you mean 'build'"),
        ("pipe.py:VALUE", "is a int and cannot be called"),
    ],
)
def test_target_that_is_not_there_is_wrong_input(load_target, target, expected):
    with pytest.raises(InputError, match=expected):
        load_target(ADDER + "\n    VALUE = 3\n", target=target)


def test_import_that_fails_inside_the_target_is_the_workloads_failure(load_target):
    with pytest.raises(WorkloadError, match=r"importing.*raised: ModuleNotFoundError: No module named 'not_installed'"):
        load_target("import not_installed\n")


def test_package_whose_own_import_fails_is_not_called_absent(tmp_path, load_target):
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("import not_installed\n")
    (package / "inner.py").write_text("def build(): return print\n")
    with pytest.raises(WorkloadError, match="No module named 'not_installed'"):
        load_target(ADDER, target="broken_package.inner:build")


def test_file_that_failed_to_import_leaves_no_half_module(load_target):
    import sys

    with pytest.raises(WorkloadError, match="raised: ZeroDivisionError"):
        load_target("1 / 0\n")
    assert "pipe" not in sys.modules


def test_factory_that_raises_is_shown_with_its_own_lines(load_target):
    with pytest.raises(WorkloadError, match=r"The factory pipe.py:build raised: ValueError: no weights") as caught:
        load_target(
            """
            def build():
                return open_weights()
            def open_weights():
                raise ValueError("no weights")
            """
        )
    assert 'raise ValueError("no weights")' in str(caught.value)
    assert "/perfladder/" not in str(caught.value)


def test_error_inside_a_library_shows_the_users_line_too(load_target):
    loaded = load_target(
        """
        import torch
        def build():
            return run
        def run():
            net = torch.nn.Linear(2, 2)
            return net(torch.zeros(3))
        """
    )
    with pytest.raises(WorkloadError) as caught:
        loaded.run()
    assert "return net(torch.zeros(3))" in str(caught.value)


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "import asyncio; raise asyncio.CancelledError"])
def test_factory_that_exits_is_the_workloads_failure(load_target, statement):
    with pytest.raises(WorkloadError, match=r"The factory pipe.py:build raised"):
        load_target(f"def build():\n    {statement}\n")


def test_keyboard_interrupt_passes_through_user_code(load_target):
    with pytest.raises(KeyboardInterrupt):
        load_target("def build():\n    raise KeyboardInterrupt\n")


def test_factory_that_returns_none_is_explained(load_target):
    with pytest.raises(WorkloadError, match="returned None; it must return the object to profile"):
        load_target("def build():\n    pass\n")


def test_factory_argument_that_is_unknown_suggests_a_near_name(load_target):
    with pytest.raises(InputError, match=r"target_args: the factory pipe.py:build does not accept.*mean 'offset'"):
        load_target(ADDER, target_args={"ofset": 1})


def test_out_of_memory_in_user_code_is_named(load_target):
    loaded = load_target("def build():\n    return run\ndef run():\n    raise MemoryError\n")
    with pytest.raises(WorkloadError, match="The workload's call ran out of memory"):
        loaded.run()


# Device and dtype


def test_factory_that_takes_device_and_dtype_gets_both(load_target):
    loaded = load_target(
        """
        def build(device, dtype):
            return lambda: (device, dtype)
        """,
        dtype="bfloat16",
    )
    assert loaded.run().value == ("cpu", "bfloat16")


def test_module_is_moved_to_the_asked_dtype(load_target):
    source = "import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n"
    loaded = load_target(source, dtype="float64", inputs={"input": {"$tensor": [1, 2], "dtype": "float64"}})
    assert loaded.info({}).dtypes == ["float64"]
    assert loaded.run().value.dtype == torch.float64


def test_what_to_returns_is_used_even_when_it_is_falsy(load_target):
    loaded = load_target(
        """
        class Empty:
            def __init__(self, moved=False):
                self.moved = moved
            def __len__(self):
                return 0
            def to(self, device):
                return Empty(moved=True)
            def __call__(self):
                return self.moved
        def build():
            return Empty()
        """
    )
    assert loaded.run().value is True


def test_dtype_for_an_object_without_to_is_refused(load_target):
    with pytest.raises(InputError, match=r"has no .to\(\)"):
        load_target(ADDER, dtype="float16")


def test_lazy_parameters_are_not_counted(load_target):
    source = "import torch\ndef build():\n    return torch.nn.LazyLinear(2)\n"
    loaded = load_target(source, inputs={"input": {"$tensor": [1, 2]}})
    assert loaded.info({}).num_parameters == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_missing_gpu_is_not_possible_here_and_names_the_way_out():
    with pytest.raises(NotPossibleHereError, match=r"device: 'cuda' was asked for.*'device: auto'.*doctor") as caught:
        resolve_device("cuda")
    assert caught.value.exit_code == 4
    assert resolve_device("auto") == CPU


def test_unknown_device_type_is_wrong_input():
    with pytest.raises(InputError, match="device: 'gpu' is no device type of torch"):
        resolve_device("gpu")


def test_cpu_with_an_index_is_the_cpu():
    assert resolve_device("cpu:0") == CPU


# Calls and inputs


def test_call_by_dotted_path(load_target):
    assert load_target(ADDER, call="scaled", inputs={"factor": 4}).run().value == 12


def test_call_of_a_function_gets_the_object_first(load_target):
    assert load_target(ADDER, call="pipe.py:twice", inputs={"x": 1}).run().value == 6


def test_object_that_cannot_be_called_is_refused(load_target):
    with pytest.raises(InputError, match=r"call: the target \(list\) is not callable; name a method"):
        load_target("def build():\n    return [1]\n")


def test_call_that_is_not_there_suggests_a_near_name(load_target):
    with pytest.raises(InputError, match=r"call: the target .* has no 'scald'. Did you mean 'scaled'"):
        load_target(ADDER, call="scald")


def test_call_of_what_is_no_method_is_refused(load_target):
    with pytest.raises(InputError, match="call: 'size' is a int and cannot be called"):
        load_target("class A:\n    size = 3\ndef build():\n    return A()\n", call="size")


def test_unknown_input_suggests_a_near_name_before_anything_runs(load_target):
    with pytest.raises(InputError, match=r"inputs: the target's scaled does not accept.*Did you mean 'factor'"):
        load_target(ADDER, call="scaled", inputs={"facter": 1})


def test_missing_input_is_named(load_target):
    with pytest.raises(InputError, match="missing a required argument: 'factor'"):
        load_target(ADDER, call="scaled")


def test_inputs_of_a_scenario_are_checked_under_its_name(load_target):
    with pytest.raises(InputError, match=r"scenarios.big: the target"):
        load_target(ADDER, scenarios={"big": {"z": 1}})


def test_inputs_of_a_module_are_checked_against_its_forward(wrap):
    with pytest.raises(InputError, match=r"inputs: the target does not accept.*Did you mean 'input'"):
        wrap(torch.nn.Linear(2, 2), inputs={"inputs": 1})


def test_a_call_that_takes_anything_is_not_second_guessed(wrap):
    assert wrap(lambda **anything: anything, inputs={"x": 1}).run().value == {"x": 1}


def test_scenario_overrides_inputs_by_name(load_target):
    loaded = load_target(ADDER, inputs={"x": 10, "y": 1}, scenarios={"big": {"x": 100}})
    assert (loaded.run().value, loaded.run("big").value) == (11, 101)


def test_tensor_inputs_are_made_also_inside_containers(wrap):
    loaded = wrap(
        lambda a, b: (a, b),
        inputs={"a": {"$tensor": [2, 3], "dtype": "int64", "fill": "arange"}, "b": [{"c": {"$tensor": [1]}}]},
    )
    a, b = loaded.run().value
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(b[0]["c"], torch.Tensor)


def test_two_tensor_inputs_of_one_shape_differ(wrap):
    a, b = wrap(lambda a, b: (a, b), inputs={"a": {"$tensor": [4]}, "b": {"$tensor": [4]}}).run().value
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"$tensor": [1], "dtyp": "int8"}, "unknown keys"),
        ({"$tensor": 3}, "must be a list of sizes"),
        ({"$tensor": [-1]}, "must be a list of sizes"),
        ({"$tensor": [1], "dtype": "load"}, "is no dtype of torch"),
        ({"$tensor": [1], "fill": "random"}, "accepted: normal, zeros, ones, arange"),
    ],
)
def test_wrong_tensor_input_is_explained(spec, expected):
    with pytest.raises(InputError, match=f"inputs.x.*{expected}"):
        make_tensor(spec, device=CPU, seed=0, field_name="inputs.x")


@pytest.mark.parametrize("fill", ["normal", "zeros", "ones", "arange"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "complex64", "bool", "int64"])
def test_tensor_inputs_have_the_asked_dtype(fill, dtype):
    made = make_tensor({"$tensor": [2, 2], "dtype": dtype, "fill": fill}, device=CPU, seed=0, field_name="x")
    assert made.dtype == getattr(torch, dtype)
    assert list(made.shape) == [2, 2]


# Runs


def test_seeds_make_runs_identical(load_target):
    loaded = load_target(
        """
        import random
        import numpy as np
        import torch
        def build():
            return lambda: (random.random(), float(np.random.rand()), torch.rand(2).tolist())
        """
    )
    values = []
    for _ in range(2):
        loaded.prepare_run()
        values.append(loaded.run().value)
    assert values[0] == values[1]
    assert loaded.run().value != values[0]


def test_a_run_that_changes_its_inputs_does_not_change_the_next(wrap):
    def change(x, items):
        x.add_(1)
        items.pop()
        return float(x.sum()), len(items)

    loaded = wrap(change, inputs={"x": {"$tensor": [2], "fill": "zeros"}, "items": [1, 2]})
    loaded.prepare_run()
    assert [loaded.run().value for _ in range(3)] == [(2.0, 1)] * 3


def test_gradients_are_off_in_a_run(wrap):
    assert wrap(torch.is_grad_enabled).run().value is False


def generate():
    yield from "ab"


async def answer():
    return 42


async def generate_async():
    yield "a"
    yield "b"


class Countdown:
    def __init__(self):
        self.left = 3

    def __iter__(self):
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


async def answer_with_a_stream():
    return generate()


@pytest.mark.parametrize(
    ("call", "value", "num_items"),
    [
        (generate, "b", 2),
        (generate_async, "b", 2),
        (Countdown, 0, 3),
        (lambda: iter([]), None, 0),
        (answer_with_a_stream, "b", 2),
    ],
)
def test_streamed_output_is_consumed_and_its_arrivals_noted(wrap, clock, call, value, num_items):
    output = wrap(call).run(clock=clock)
    assert output.is_streamed
    assert (output.value, output.item_end_ns) == (value, [0] * num_items)


def test_coroutine_is_run_to_its_end(wrap):
    output = wrap(answer).run()
    assert (output.value, output.is_streamed) == (42, False)


class Answer:
    """An output that takes long to write out, as a large tensor does, so that it must not be."""

    num_written = 0

    def __repr__(self):
        type(self).num_written += 1
        return "an answer"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_a_coroutine_returns_is_not_written_out(wrap, is_streamed):
    async def respond():
        return Answer()

    async def stream():
        yield Answer()

    output = wrap(stream if is_streamed else respond).run()
    assert (type(output.value), Answer.num_written) == (Answer, 0)


def test_an_interrupt_in_a_coroutine_ends_the_call_as_a_plain_one_and_its_tasks(wrap, capfd):
    ended = []

    async def helper():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("helper")

    async def interrupted():
        task = asyncio.create_task(helper())
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        await task

    with pytest.raises(KeyboardInterrupt):
        wrap(interrupted).run()
    assert ended == ["helper"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert wrap(answer).run().value == 42
    assert capfd.readouterr() == ("", "")


def test_error_in_the_middle_of_a_stream_is_the_workloads_failure(wrap):
    def fail():
        yield 1
        raise ValueError("at the second chunk")

    with pytest.raises(WorkloadError, match="at the second chunk"):
        wrap(fail).run()


# Attention and compile


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_attention_backend_that_the_cpu_lacks_is_refused(load_target, name):
    with pytest.raises(NotPossibleHereError, match=f"attention_backend: '{name}' does not run on cpu"):
        load_target(ADDER, attention_backend=name)


def test_attention_backend_that_nobody_knows_is_wrong_input(load_target):
    with pytest.raises(InputError, match="attention_backend: 'flesh' is none of flash, efficient, cudnn, math"):
        load_target(ADDER, attention_backend="flesh")


def test_attention_backend_is_in_force_in_a_run(wrap):
    def enabled():
        return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()

    before = enabled()
    assert wrap(enabled, attention_backend="math").run().value == (False, True)
    assert enabled() == before


def test_diffusers_attention_backend_is_set_or_refused(load_target):
    source = """
        import torch
        class Net(torch.nn.Module):
            asked = None
            def set_attention_backend(self, name):
                if name != "native":
                    raise ValueError("no such backend")
                self.asked = name
            def forward(self):
                return self.asked
        def build():
            return Net()
    """
    assert load_target(source, attention_backend="native").run().value == "native"
    with pytest.raises(NotPossibleHereError, match="'sage' cannot be used here: no such backend"):
        load_target(source, attention_backend="sage")


TWO_NAMES = """
    import torch
    class Pipe:
        def __init__(self):
            self.net = torch.nn.Linear(2, 2)
            self.parts = {"net": self.net}
            self.fixed = (torch.nn.Linear(2, 2),)
            self.size = 3
        def __call__(self):
            return self.net(torch.zeros(1, 2)) + self.parts["net"](torch.ones(1, 2))
    def build():
        return Pipe()
"""


def test_module_under_two_names_is_compiled_under_both(load_target, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, mode: torch.nn.Sequential(module))
    loaded = load_target(TWO_NAMES, compile={"only": ["net"]})
    assert loaded.compiled_modules == ["net"]
    assert isinstance(loaded.obj.net, torch.nn.Sequential)
    assert loaded.obj.parts["net"] is loaded.obj.net


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("nett", "compile.only: the target .* has no 'nett'. Did you mean 'net'"),
        ("size", "compile.only: 'size' is a int, not a torch.nn.Module"),
        ("fixed.0", "compile.only: 'fixed.0' cannot be replaced in a tuple"),
    ],
)
def test_what_cannot_be_compiled_is_wrong_input(load_target, monkeypatch, only, expected):
    monkeypatch.setattr(torch, "compile", lambda module, mode: torch.nn.Sequential(module))
    with pytest.raises(InputError, match=expected):
        load_target(TWO_NAMES, compile={"only": [only]})


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_module_is_still_observed(load_target):
    from perfladder.rungs.stages import StagesRequest, measure

    loaded = load_target(TWO_NAMES, compile={"only": ["net"]}, warmup_runs=1, measured_runs=2)
    result = measure(loaded, StagesRequest())
    assert {stage.name: stage.calls_per_run for stage in result.default.stages} == {"net": 2.0}
    assert result.observed is not None
    assert result.observed.is_compile_warm


def test_find_callable_reads_a_module_attribute():
    from pathlib import Path

    assert find_callable("os.path:join", Path(), field_name="call")("a", "b") == "a/b"


def test_async_target_runs_where_a_loop_is_running_already(wrap):
    class Async:
        async def __call__(self):
            await asyncio.sleep(0)
            return torch.ones(1, requires_grad=True) * 2

    async def cell():
        return wrap(Async()).run()

    output = asyncio.run(cell()).value
    assert output.tolist() == [2]
    assert not output.requires_grad


def test_tensor_that_cannot_be_made_is_named(load_target):
    with pytest.raises(InputError, match=r"inputs.x: a tensor of shape \[10000000, 1000000\]"):
        load_target("def build(): return lambda x: x", inputs={"x": {"$tensor": [10000000, 1000000]}})


@pytest.mark.parametrize("attribute", ["lambda self, name: (lambda: None)", "lambda self, name: 1 / 0"])
def test_object_with_an_odd_getattr_runs(load_target, attribute):
    source = f"class Odd:\n    __getattr__ = {attribute}\n    def __call__(self): return 1\ndef build(): return Odd()"
    assert load_target(source).run().value == 1
