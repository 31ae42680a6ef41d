import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.errors import InputError


def test_stages_of_an_object_in_place(clock):
    class Pipe:
        def __init__(self):
            self.net = nn.Linear(2, 2)

        def __call__(self, x, scale):
            clock.pass_ms(1)
            with pl.stage("scaling"):
                clock.pass_ms(3)
            return self.net(x) * scale

    result = pl.time_stages(Pipe(), {"x": torch.ones(1, 2), "scale": torch.tensor(2.0)}, measured_runs=2, clock=clock)
    assert result.dominating == "scaling"
    assert result.default.stages[0].share == 0.75
    assert result.default.wall_ms.values == [4.0, 4.0]
    assert result.device == "cpu"


def test_inputs_of_one_run_do_not_change_those_of_the_next(clock):
    seen = []

    def call(x):
        seen.append(float(x))
        x += 1

    pl.time_stages(call, {"x": torch.zeros(())}, warmup_runs=1, measured_runs=2, clock=lambda: next(ticks))
    assert set(seen) == {0.0}


ticks = iter(range(0, 10**12, 10**6))


def test_wrong_inputs_are_told_by_name():
    with pytest.raises(InputError, match="expected a mapping of keyword arguments, got a list"):
        pl.time_stages(lambda x: x, [1])
    with pytest.raises(InputError, match="inputs: the target does not accept these arguments"):
        pl.time_stages(lambda x: x, {"y": 1})
