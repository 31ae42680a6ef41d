"""What the options of `perfladder tune` mean, and which of them are refused."""

from typing import get_args

import pytest

from perfladder.errors import InputError
from perfladder.tuning import quality
from perfladder.tuning.tune_request import BackendChoice, GateChoice, Metric, tune_request

DEFAULTS = {"backends": [], "quality": None, "keep": "faster", "save": None, "cache_dir": None}


def request_of(**options):
    return tune_request(**(DEFAULTS | options))


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("eager", "eager", {}),
        ("inductor_jit:mode=max-autotune,dynamic=true", "inductor_jit", {"mode": "max-autotune", "dynamic": True}),
        ("mine:size=3, ratio=0.5", "mine", {"size": 3, "ratio": 0.5}),
        (
            "inductor_jit:options={a: 1, b: 2},dynamic=null",
            "inductor_jit",
            {"options": {"a": 1, "b": 2}, "dynamic": None},
        ),
        ("mine:sizes=[1, 2],name=x", "mine", {"sizes": [1, 2], "name": "x"}),
    ],
)
def test_a_backend_is_a_name_with_options(text, name, options):
    assert BackendChoice.parse(text) == BackendChoice(name=name, options=options)


@pytest.mark.parametrize("text", ["", ":a=1", "eager:mode", "eager:=1", "eager:a={"])
def test_other_forms_of_a_backend_are_refused(text):
    with pytest.raises(InputError, match="--backend"):
        BackendChoice.parse(text)


def test_a_gate_is_a_metric_and_its_least_value():
    assert GateChoice.parse("psnr >= 30") == GateChoice(metric="psnr", minimum=30)
    assert str(GateChoice.parse("cosine>=0.990")) == "cosine >= 0.99"
    for text in ("cosine", "cosine>0.9", "cosine>=", "cosine>=nan", "likeness>=0.9"):
        with pytest.raises(InputError, match="expected one of cosine, psnr, ssim"):
            GateChoice.parse(text)


def test_metrics_are_those_of_the_quality_gate():
    assert get_args(Metric) == get_args(quality.Metric)


def test_what_is_kept_is_a_word_or_a_speedup():
    assert [request_of(keep=text).keep for text in ("faster", "right", "1.05", "1")] == ["faster", "right", 1.05, 1.0]
    for text in ("slower", "0", "-1", "nan", "inf"):
        with pytest.raises(InputError, match="keep"):
            request_of(keep=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fastest"}, "strategy: got 'fastest'; accepted: 'first-wins'"),
        ({"strategy": "latency-budget"}, "needs latency_budget_ms"),
        ({"latency_budget_ms": 5.0}, "latency_budget_ms is for the strategy latency-budget"),
        ({"strategy": "one-backend"}, "needs one backend, and 0 are given"),
        ({"pairs": 9}, "pairs: should be greater than or equal to 10"),
        ({"min_share": 2.0}, "min_share: should be less than or equal to 1"),
        ({"limit": 0}, "limit: should be greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        request_of(**options)


def test_where_to_save_is_checked_before_anything_runs(tmp_path):
    assert request_of(save=tmp_path / "a.ait").save == str(tmp_path / "a.ait")
    with pytest.raises(InputError, match="there is no folder"):
        request_of(save=tmp_path / "none" / "a.ait")
    with pytest.raises(InputError, match=r"an archive ends in \.ait, not in \.zip"):
        request_of(save=tmp_path / "a.zip")
    with pytest.raises(InputError, match="that is a folder"):
        request_of(save=tmp_path)
    with pytest.raises(InputError, match="exclude each other"):
        request_of(save=tmp_path / "a.ait", dry_run=True)
