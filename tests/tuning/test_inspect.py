"""Which modules run, how often and for how long; with a clock that the modules themselves move."""

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.errors import InputError, WorkloadError


class Step(nn.Module):
    def __init__(self, clock, ms, inner=None):
        super().__init__()
        self.clock, self.ms = clock, ms
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
        if inner is not None:
            self.inner = inner

    def forward(self, x, scale=1.0):
        self.clock.pass_ms(self.ms)
        return self.inner(x) if hasattr(self, "inner") else x


class Pipe:
    def __init__(self, clock):
        self.clock = clock
        self.unet = Step(clock, 6, Step(clock, 4))
        self.blocks = [Step(clock, 1), Step(clock, 1)]
        self.parts = {"vae": Step(clock, 2)}
        self.idle = Step(clock, 100)

    def __call__(self, prompt, steps=2):
        self.clock.pass_ms(3)
        x = torch.ones(1)
        for _ in range(steps):
            x = self.unet(x, scale=2.0)
        for block in self.blocks:
            x = block(x)
        return self.parts["vae"](x)


DATA = [{"prompt": "a lighthouse"}]


@pytest.fixture
def pipe(clock):
    return Pipe(clock)


@pytest.fixture
def inspect(clock):
    def run(obj, dataset=DATA, *args, **options):
        return pl.inspect(obj, dataset, *args, **{"number_of_iterations": 3, "clock": clock, **options})

    return run


def test_topmost_modules_that_ran_with_their_time(inspect, pipe):
    info = inspect(pipe)
    found = {module.name: module for module in info.get_modules()}
    assert list(found) == ["unet", "parts.vae", "blocks.0", "blocks.1"], "those that took most time first"
    assert (info.number_of_batches, info.total_execution_time) == (3, 3 * 27)
    unet = found["unet"]
    assert (unet.execution_count, unet.total_execution_time, unet.average_execution_time) == (6, 60, 10)
    assert unet.module is pipe.unet
    assert (unet.parent, unet.depth, unet.object_path) == (pipe, 1, "unet")
    assert found["parts.vae"].parent is pipe.parts
    assert (unet.input_types, unet.output_types) == ({"0": "Tensor", "scale": "float"}, ["Tensor"])
    assert (unet.num_parameters, unet.num_layers, unet.precisions) == (6, 1, ["float16"])
    assert unet.module_type.endswith(".Step")
    assert info.ratio(unet) == pytest.approx(20 / 27)
    assert not pipe.unet._forward_hooks


def test_filters(inspect, pipe):
    info = inspect(pipe)
    assert [m.name for m in info.get_modules(min_execution_ratio=0.5)] == ["unet"]
    assert [m.name for m in info.get_modules(min_execution_percentage=0.5)] == ["unet"]
    assert [m.name for m in info.get_modules(limit=2)] == ["unet", "parts.vae"]
    for wrong in ({"min_execution_ratio": 70}, {"limit": 0}, {"min_execution_percentage": True}):
        with pytest.raises(InputError, match="expected a"):
            info.get_modules(**wrong)
    with pytest.raises(InputError, match="one value"):
        info.get_modules(0.1, min_execution_percentage=0.1)
    with pytest.raises(InputError, match="listed already"):
        info.add_module(info.get_modules()[0])


def test_depths(inspect, pipe):
    assert {m.name for m in inspect(pipe, min_depth=2).get_modules()} == {
        "unet.inner",
        "parts.vae",
        "blocks.0",
        "blocks.1",
    }
    assert {m.name for m in inspect(pipe, max_depth=1).get_modules()} == {"unet"}


def test_the_object_itself_is_the_topmost_module(inspect, clock):
    model = Step(clock, 5, Step(clock, 2))
    (root,) = inspect(model, [torch.ones(3)]).get_modules()
    assert (root.name, root.object_path, root.depth, root.parent) == ("Step", "", 0, None)
    assert root.total_execution_time == 21
    (inner,) = inspect(model, [torch.ones(3)], min_depth=1).get_modules()
    assert (inner.name, inner.total_execution_time) == ("inner", 6)


def test_function_of_the_users_and_owner_of_a_method(inspect, pipe):
    def once(prompt):
        return pipe(prompt, steps=1)

    assert inspect(pipe, DATA, once).get_modules()[0].execution_count == 3

    class Holder:
        def __init__(self):
            self.run = pipe.__call__

        def __call__(self, prompt):
            return self.run(prompt)

    assert inspect(Holder()).get_modules()[0].name == "run.__self__.unet"
    assert inspect(pipe.__call__).get_modules()[0].name == "unet"


def test_shared_module_counts_once(inspect, clock):
    class Shares:
        def __init__(self):
            self.first = self.second = Step(clock, 1)

        def __call__(self, prompt):
            self.second(self.first(torch.ones(1)))

    (only,) = inspect(Shares()).get_modules()
    assert (only.name, only.execution_count) == ("first", 6)


def test_warmup_and_samples_in_turn(inspect, clock):
    seen = []

    class Notes(nn.Module):
        def forward(self, x):
            seen.append(int(x))
            return x

    inspect(Notes(), [torch.tensor(1), torch.tensor(2)], warmup_iterations=3)
    assert seen == [1, 1, 2, 1, 2, 1], "one run to look, two more to warm up, three that are measured"


def test_wrong_values_and_failures_are_told(inspect, pipe, clock):
    for name in ("number_of_iterations", "warmup_iterations", "min_depth", "max_depth"):
        with pytest.raises(InputError, match=f"{name}: expected a whole number"):
            inspect(pipe, **{name: -1})
    with pytest.raises(InputError, match="No module of the object ran"):
        inspect(lambda prompt: None)
    with pytest.raises(InputError, match="cannot be called; give an inference_function"):
        inspect(object())
    with pytest.raises(WorkloadError, match="unexpected keyword"):
        inspect(pipe, [{"prompts": "x"}])
    assert not pipe.unet._forward_hooks


def test_describe_prints_a_table(inspect, pipe, capsys):
    inspect(pipe).describe()
    text = capsys.readouterr().out
    for words in ("unet", "parts.vae", "3 iterations", "74.1%", "float16"):
        assert words in text


def test_a_key_with_a_dot_is_no_path_and_no_error():
    class Holder:
        def __init__(self):
            self.parts = {"plain": nn.Linear(2, 2), "with.dot": nn.Linear(2, 2)}

        def __call__(self, x):
            return self.parts["with.dot"](self.parts["plain"](x))

    info = pl.inspect(Holder(), [torch.ones(2)], number_of_iterations=1, warmup_iterations=0)
    assert [module.object_path for module in info.get_modules()] == ["parts.plain"]


def test_an_entry_prints_in_a_line():
    info = pl.inspect(nn.Sequential(nn.Linear(2, 2)), [torch.ones(2)], number_of_iterations=1, warmup_iterations=0)
    assert "\n" not in repr(info.get_modules())
