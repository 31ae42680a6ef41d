"""The child's part of an interleaved comparison, in this process and with a clock that the target moves."""

import pytest

from perfladder.comparing.turns import CollectRequest, PrepareRequest, TurnRequest, collect, prepare, take_turn
from perfladder.errors import InputError

SOURCE = """
    import torch

    class Part(torch.nn.Module):
        calls = 0

        def forward(self, x):
            Part.calls += 1
            return x

    class Pipe:
        def __init__(self):
            self.part = Part()

        def __call__(self, width=2):
            return self.part(torch.ones(1, width))

    def build():
        return Pipe()
"""


def test_only_counted_turns_are_samples_each_scenario_apart(load_target, clock):
    loaded = load_target(SOURCE, scenarios={"wide": {"width": 4}})
    part = loaded.obj.part
    part.register_forward_hook(lambda *_: clock.pass_ms(5))
    assert prepare(loaded, PrepareRequest(), clock=clock).run_ms == 5
    take_turn(loaded, TurnRequest(is_counted=False), clock=clock)
    calls = type(part).calls
    assert take_turn(loaded, TurnRequest(num_settling=2), clock=clock).wall_ms == 5
    assert type(part).calls == calls + 3
    for scenario in (None, "wide", "wide"):
        take_turn(loaded, TurnRequest(scenario=scenario), clock=clock)
    result = collect(loaded, CollectRequest())
    assert {timing.name: timing.wall_ms.launches for timing in result.scenarios} == {
        "default": [[5, 5]],
        "wide": [[5, 5]],
    }
    stage = result.default.stages[0]
    assert (stage.name, stage.self_ms.launches, stage.calls_per_run) == ("part", [[5, 5]], 1)
    assert (result.warmup_ms, result.first_call_ms, result.metric.value) == ([5], 5, 5)
    assert result.observed.output_shapes == {"output": [1, 2]}


def test_code_of_the_work_tree_in_the_measurement_of_a_commit_is_refused(load_target, tmp_path):
    """As a package that is installed as editable would bring it."""
    loaded = load_target(SOURCE)
    request = PrepareRequest(own_root=str(tmp_path / "checkout"), foreign_root=str(tmp_path))
    with pytest.raises(InputError, match=r"loaded from .*pipe\.py, in your own work tree"):
        prepare(loaded, request)
    prepare(loaded, PrepareRequest(own_root=str(tmp_path), foreign_root=str(tmp_path)))
