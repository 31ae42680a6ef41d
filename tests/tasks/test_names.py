"""Names and values as MLflow accepts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfladder.tasks.names import MAX_NAME_CHARS, flatten, slug, slugs, unslug


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("stage/vae.decode/self_ms_p50", "stage/vae.decode/self_ms_p50"),
        ("aten::linear", "aten::linear"),
        ("down(0)", "down_x28_0_x29_"),
        ("a_x28_b", "a_x5f_x28_b"),
        ("..", "_x2e__x2e_"),
        ("/lead", "_x_/lead"),
        ("a//b", "a/_x_/b"),
        ("日本", "_x65e5__x672c_"),
    ],
)
def test_names_are_spelt_with_legal_characters(name: str, spelt: str) -> None:
    assert slug(name) == spelt
    assert unslug(spelt) == name


@given(st.text(max_size=30))
def test_any_name_comes_back(name: str) -> None:
    assert unslug(slug(name)) == name


@given(st.text(min_size=1, max_size=300))
def test_any_name_is_accepted_by_mlflow(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(slug(name))


def test_names_that_are_too_long_stay_apart() -> None:
    one, other = slug("x" * 400), slug("x" * 401)
    assert len(one) == MAX_NAME_CHARS
    assert one != other
    with pytest.raises(ValueError, match="cut"):
        unslug(one)


def test_a_shared_slug_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfladder.tasks.names.slug", lambda name: "same")
    with pytest.raises(ValueError, match="both written 'same'"):
        slugs(["a", "b"])


def test_nested_values_get_flat_keys() -> None:
    value = {
        "name": "toy",
        "inputs": {"steps": 4, "size": [64, 64]},
        "empty": {},
        "devices": [{"name": "gpu"}],
        "call": None,
    }
    assert flatten(value) == {
        "name": "toy",
        "inputs.steps": "4",
        "inputs.size": "[64, 64]",
        "empty": "{}",
        "devices.0.name": "gpu",
        "call": "null",
    }
