"""Classes of libraries, and those that users register."""

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from perfladder import register_capture_type
from perfladder.capturing import types
from perfladder.capturing.decode import Decoder
from perfladder.capturing.encode import Encoder
from perfladder.errors import CaptureError, InputError


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(types, "_registered", {})


def back(value):
    encoder = Encoder()
    nodes = encoder.encode({"x": value}, identity=True)
    assert encoder.unsupported == {}
    return Decoder(encoder.blocks, encoder.storages).decode(nodes)["x"]


@dataclass
class Frame:
    pixels: torch.Tensor
    index: int = 0


class Window:
    def __init__(self, size):
        self.size, self.frames = size, [Frame(torch.ones(2), n) for n in range(size)]


class Handle:
    """Holds what no capture can: only its functions know what it is made of."""

    def __init__(self, number):
        self.number, self.lock = number, object()


class Color(enum.Enum):
    RED = "r"


Pair = namedtuple("Pair", "left right")


def test_dataclass_enum_and_named_tuple_come_back_once_registered():
    for kind in (Frame, Color, Pair):
        register_capture_type(kind)
    frame = back(Frame(torch.arange(3), 2))
    assert type(frame) is Frame
    assert (frame.pixels.tolist(), frame.index) == ([0, 1, 2], 2)
    assert back(Color.RED) is Color.RED
    assert back(Pair(1, [2])) == Pair(1, [2])


def test_plain_class_comes_back_by_its_attributes():
    register_capture_type(Frame)
    decorated = register_capture_type(Window)
    assert decorated is Window
    window = back(Window(2))
    assert (window.size, [frame.index for frame in window.frames]) == (2, [0, 1])


def test_functions_tell_what_a_class_is_made_of():
    register_capture_type(Handle, to_state=lambda handle: {"n": handle.number}, from_state=lambda s: Handle(s["n"]))
    assert back(Handle(7)).number == 7


def test_class_that_is_not_registered_is_named_with_the_remedy():
    encoder = Encoder()
    encoder.encode({"x": Handle(1)})
    assert "Handle cannot be stored; see register_capture_type()" in encoder.unsupported["x"]
    register_capture_type(Frame)
    nodes = Encoder().encode({"x": Frame(torch.ones(1))})
    types._registered.clear()
    with pytest.raises(CaptureError, match="register_capture_type"):
        Decoder([torch.ones(1).view(torch.uint8)]).decode(nodes)


def test_wrong_registrations_are_refused():
    with pytest.raises(InputError, match="expected a class, got a int"):
        register_capture_type(3)
    with pytest.raises(InputError, match="give both to_state and from_state, or neither"):
        register_capture_type(Handle, to_state=vars)


def test_results_of_torch_and_ordered_dicts():
    found = back(torch.max(torch.tensor([[1.0, 3.0], [5.0, 2.0]]), dim=1))
    assert type(found) is torch.return_types.max
    assert (found.values.tolist(), found.indices.tolist()) == ([3, 5], [1, 0])
    ordered = back(OrderedDict([("b", 1), (("a", 2), torch.ones(1))]))
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", ("a", 2)]


def test_image_of_pil():
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    image = back(image_module.fromarray(pixels))
    assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache", "EncoderDecoderCache"])
def test_caches_of_keys_and_values(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=10
    )

    def grown():
        if kind == "StaticCache":
            return transformers.StaticCache(config=config, max_cache_len=6)
        return transformers.DynamicCache(config=config)

    def grow(cache, length):
        keys = torch.arange(2.0 * length * 4).reshape(1, 2, length, 4)
        return [cache.update(keys, keys + 1, layer) for layer in range(2)]

    cache = grown()
    if kind == "EncoderDecoderCache":
        grow(cache, 3)
        other = back(transformers.EncoderDecoderCache(cache, transformers.DynamicCache(config=config)))
        assert type(other).__name__ == kind
        cache, again = cache, other.self_attention_cache
    else:
        grow(cache, 3)
        again = back(cache)
    assert type(again) is type(cache)
    for left, right in zip(grow(cache, 2), grow(again, 2), strict=True):
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])
    assert again.get_seq_length() == cache.get_seq_length()


def test_output_class_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = back(outputs.BaseModelOutput(last_hidden_state=torch.ones(1, 2), hidden_states=(torch.zeros(1),)))
    assert type(found) is outputs.BaseModelOutput
    assert found.last_hidden_state.shape == (1, 2)
    assert found.attentions is None
