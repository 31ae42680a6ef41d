import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfladder.trace.labels import Label, decode_label, encode_label

NASTY = [
    'unet["mid"]',
    "back\\slash",
    "new\nline",
    "tab\t",
    "日本",
    "%41",
    "a:b",
    "",
    "\ud800",
    "\x00",
    "a%",
    "{}",
    "'",
]


@given(st.text(alphabet=st.characters(), max_size=60))
def test_any_name_survives(name: str) -> None:
    text = encode_label("untuned_module", name)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(f'"{text}"') == text
    assert decode_label(text) == Label("untuned_module", name)


@pytest.mark.parametrize("name", NASTY)
def test_nasty_names_survive(name: str) -> None:
    assert decode_label(encode_label("stage", name)) == ("stage", name)


def test_ordinary_paths_stay_readable() -> None:
    assert encode_label("untuned_module", "unet.down_blocks.0") == "perfladder.untuned_module:unet.down_blocks.0"
    assert encode_label("profiled_run", "3") == "perfladder.profiled_run:3"
    allowed = "/()[]+=@*,:" + "_.-" + string.ascii_letters + string.digits
    assert encode_label("stage", allowed) == f"perfladder.stage:{allowed}"


@pytest.mark.parametrize(
    "text",
    ["aten::add", "perfladder.", "perfladder.stage", "perfladder.Stage:x", "perfladder.stage:%4", "x perfladder.a:b"],
)
def test_foreign_names_are_no_labels(text: str) -> None:
    assert decode_label(text) is None


def test_invalid_utf8_escape_is_no_label() -> None:
    assert decode_label("perfladder.stage:%FF") is None


@pytest.mark.parametrize("kind", ["", "Stage", "a b", "1a"])
def test_kind_must_be_an_identifier(kind: str) -> None:
    with pytest.raises(ValueError, match="identifier"):
        encode_label(kind, "x")


def test_region_id_is_the_plain_name() -> None:
    assert Label("untuned_module", 'a["b"]').region_id == 'untuned_module:a["b"]'
