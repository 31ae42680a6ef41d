"""An unmodified script, stopped at the call that matters; what is called again is that call."""

import sys
import textwrap

import pytest
import torch

from perfladder.errors import InputError, WorkloadError
from perfladder.scripts.workload import script_workload
from perfladder.target import LoadedTarget

MODULES = """
    import torch
    from torch import nn

    net = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    seen = []
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A script, run up to its call in this process, which is as before afterwards."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    def make(source, *arguments, **options):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(MODULES) + textwrap.dedent(source))
        file = script_workload(str(path), arguments, **options)
        loaded = LoadedTarget(file.workload, file.base_dir)
        loaded.load()
        return loaded

    return make


def value_of(loaded):
    loaded.prepare_run()
    return loaded.run().value


def test_a_function_of_the_script_is_called_again_with_its_arguments(load):
    loaded = load(
        """
        import sys

        def work(x, times=1):
            for _ in range(times):
                x = net(x)
            return x

        if __name__ == "__main__":
            work(torch.ones(1, 4) * float(sys.argv[1]), times=2)
            raise RuntimeError("never reached")
        """,
        "3",
        function="work",
    )
    net = loaded.obj.net
    assert set(vars(loaded.obj)) == {"net"}
    assert value_of(loaded).equal(net(net(torch.ones(1, 4) * 3)))
    assert loaded.info({}).description.startswith("work, called at ")


def test_the_nth_call_counts_those_from_outside(load):
    loaded = load(
        """
        def work(x, depth=0):
            return work(x, depth - 1) if depth else net(x)

        for number in range(3):
            work(torch.full((1, 4), float(number)), depth=number)
        """,
        function="work",
        nth=3,
    )
    assert value_of(loaded).equal(loaded.obj.net(torch.full((1, 4), 2.0)))


@pytest.mark.parametrize(
    ("decorator", "first", "owner"),
    [("", "self, ", "Box"), ("@staticmethod", "", "ScriptFunction"), ("@torch.no_grad()", "self, ", "Box")],
)
def test_methods_are_called_on_their_object(load, decorator, first, owner):
    loaded = load(
        f"""
        class Box:
            def __init__(self):
                self.net = net

            {decorator or "# as it is"}
            def work({first}x):
                return net(x)

        Box().work(torch.ones(1, 4))
        """,
        function="Box.work",
    )
    assert type(loaded.obj).__name__ == owner
    assert value_of(loaded).equal(loaded.obj.net(torch.ones(1, 4)))


def test_a_function_of_another_module_is_named_with_it(load, tmp_path):
    (tmp_path / "away_module.py").write_text("def work(model, x):\n    return model(x)\n")
    loaded = load("from away_module import work\nwork(net, torch.ones(1, 4))", function="away_module:work")
    assert value_of(loaded).equal(loaded.obj.model(torch.ones(1, 4)))
    import away_module

    assert away_module.work.__name__ == "work"
    assert not hasattr(away_module.work, "__wrapped__")


def test_without_a_pipeline_the_module_called_for_longest_is_taken(load):
    loaded = load(
        """
        slow = nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)])
        for _ in range(3):
            other(torch.ones(1, 4))
            slow(torch.ones(512, 512))
        """
    )
    assert isinstance(loaded.obj, torch.nn.Sequential)
    assert value_of(loaded).equal(loaded.obj(torch.ones(512, 512)))
    assert loaded.info({}).description.startswith("Sequential.__call__, called at ")
    # What torch asks before it warns of global hooks, and compiles with them.
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_call_changes_copies_of_its_arguments_only(load):
    loaded = load(
        """
        def work(x, generator):
            x += torch.randn(1, 4, generator=generator)
            return net(x)

        work(torch.zeros(1, 4), torch.Generator().manual_seed(3))
        """,
        function="work",
    )
    assert value_of(loaded).equal(value_of(loaded))


def test_modes_of_the_script_are_in_force_again_and_only_then(load):
    loaded = load(
        """
        def work():
            seen.append((
                torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
                torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(),
            ))
            return net(torch.ones(1, 4))

        torch.set_float32_matmul_precision("high")
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.backends.cudnn.flags(benchmark=True):
            work()
        """,
        function="work",
    )
    try:
        assert value_of(loaded).dtype == torch.bfloat16
        assert sys.modules["__main__"].seen == [(True, True, True, "high")]
        assert not torch.is_inference_mode_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_a_script_does_at_its_end_is_done_and_its_handlers_do_not_take_the_stop_for_an_error(load, tmp_path):
    load(
        f"""
        def work():
            return net(torch.ones(1, 4))

        try:
            try:
                work()
            except Exception:
                raise SystemExit("taken for an error")
        finally:
            open({str(tmp_path / "closed")!r}, "w").close()
        """,
        function="work",
    )
    assert (tmp_path / "closed").exists()


@pytest.mark.slow
def test_generate_of_a_transformers_model_is_found(load):
    loaded = load(
        """
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.generation.utils import GenerationMixin

        before = GenerationMixin.__dict__["generate"]
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        other(torch.ones(1, 4))
        model.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=2, do_sample=False, pad_token_id=0)
        """
    )
    from transformers.generation.utils import GenerationMixin

    assert type(loaded.obj).__name__ == "GPT2LMHeadModel"
    assert value_of(loaded).shape == (1, 5)
    assert not hasattr(GenerationMixin.generate, "__wrapped__") or "perfladder" not in repr(GenerationMixin.generate)
    assert "perfladder" not in GenerationMixin.generate.__code__.co_filename
    assert "perfladder" not in str(GenerationMixin.__dict__.get("__init_subclass__"))


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("def work(): pass", {"function": "wrok"}, InputError, "Did you mean 'work'"),
        ("def work(): pass", {"function": "work"}, WorkloadError, "ran to its end, and did not call work"),
        ("", {}, WorkloadError, "called no module and none of DiffusionPipeline.__call__"),
        ("raise SystemExit(4)", {}, WorkloadError, "ended before its call, with exit code 4"),
        ("raise SystemExit('a file, please')", {}, WorkloadError, "ended before its call, saying: a file, please"),
        ("1 / 0", {}, WorkloadError, "ZeroDivisionError: division by zero"),
        ("def (", {}, WorkloadError, "SyntaxError"),
        (
            "def work(): net(torch.ones(4))\nwork()",
            {"function": "work", "nth": 2},
            WorkloadError,
            "1 such calls, not 2",
        ),
        ("", {"function": "no_such_module:work"}, InputError, "No module named 'no_such_module'"),
        ("", {"function": "math:sqrt"}, InputError, "not a function of Python"),
    ],
)
def test_a_script_without_that_call_says_what_is_missing(load, source, options, error, message):
    with pytest.raises(error, match=message):
        load(source, **options)


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no\.py is no file"):
        script_workload(str(tmp_path / "no.py"))
