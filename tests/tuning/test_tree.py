"""Nested arguments are taken apart into leaves with paths, and put together again."""

import collections
import dataclasses
import enum
import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from perfladder.errors import InputError
from perfladder.tuning.tree import (
    bind,
    copied,
    input_leaves,
    map_inputs,
    map_tensors,
    output_leaves,
    parameter_names,
    register_input_type,
)

Pair = collections.namedtuple("Pair", ["image", "text"])


@dataclasses.dataclass
class Request:
    image: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor


class Mode(enum.Enum):
    FAST = "fast"


class Opaque:
    def __init__(self, x=None):
        self.x = x


def ones(*shape):
    return torch.ones(shape)


def described(bound):
    return {leaf.access_path: (leaf.semantic_path, leaf.kind) for leaf in input_leaves(bound)}


def test_every_container_gives_paths_as_users_write_them():
    bound = {
        "x": ones(1),
        "options": {"mask": ones(1), 3: ones(1), ("a", 1): 2},
        "items": [ones(1), (ones(1), 2)],
        "request": Request(ones(1)),
        "frozen": Frozen(ones(1)),
        "pair": Pair(ones(1), "a"),
        "user": collections.UserDict(a=ones(1)),
        "ordered": collections.OrderedDict(b=1, a=None),
        "default": collections.defaultdict(list, z=ones(1)),
        "sorted": torch.sort(ones(2)),
    }
    assert described(bound) == {
        "x": ("x", "tensor"),
        'options["mask"]': (("options", "mask"), "tensor"),
        "options[3]": (("options", 3), "tensor"),
        "options[('a', 1)]": (("options", "('a', 1)"), "scalar"),
        "items[0]": (("items", 0), "tensor"),
        "items[1][0]": (("items", 1, 0), "tensor"),
        "items[1][1]": (("items", 1, 1), "scalar"),
        "request.image": (("request", "image"), "tensor"),
        "request.scale": (("request", "scale"), "scalar"),
        "frozen.image": (("frozen", "image"), "tensor"),
        "pair.image": (("pair", "image"), "tensor"),
        "pair.text": (("pair", "text"), "scalar"),
        'user["a"]': (("user", "a"), "tensor"),
        'ordered["b"]': (("ordered", "b"), "scalar"),
        'ordered["a"]': (("ordered", "a"), "scalar"),
        'default["z"]': (("default", "z"), "tensor"),
        "sorted.values": (("sorted", "values"), "tensor"),
        "sorted.indices": (("sorted", "indices"), "tensor"),
    }


def test_keys_are_shown_in_the_order_given():
    assert list(described({"options": {"b": 1, "a": 2}})) == ['options["b"]', 'options["a"]']


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, 1j, "a", b"a", ..., slice(1), range(2), Mode.FAST, torch.float16, torch.device("cpu")],
)
def test_settings_are_scalars(value):
    ((_, kind),) = described({"x": value}).values()
    assert kind == "scalar"


def test_a_size_and_empty_containers_are_scalars_too():
    bound = {"size": torch.Size([1, 2]), "a": [], "b": {}, "c": (), "d": [{}]}
    assert described(bound) == {
        "size": ("size", "scalar"),
        "a": ("a", "scalar"),
        "b": ("b", "scalar"),
        "c": ("c", "scalar"),
        "d[0]": (("d", 0), "scalar"),
    }


@pytest.mark.parametrize("value", [Opaque(), nn.Linear(1, 1), {1}, len, Opaque, torch.Generator()])
def test_what_nobody_registered_is_an_unsupported_leaf(value):
    (leaf,) = input_leaves({"x": [value]})
    assert (leaf.path, leaf.kind, leaf.value) == (("x", 0), "unsupported", value)


def test_a_subclass_of_a_tensor_is_a_tensor():
    assert described({"x": nn.Parameter(ones(1))}) == {"x": ("x", "tensor")}


def test_outputs_are_named_output():
    def paths(output):
        return [(leaf.access_path, leaf.semantic_path, leaf.path) for leaf in output_leaves(output)]

    assert paths(ones(1)) == [("output", "output", ())]
    assert paths((ones(1), {"a": ones(1)})) == [
        ("output[0]", "0", (0,)),
        ('output[1]["a"]', (1, "a"), (1, "a")),
    ]
    assert paths(None) == [("output", "output", ())]


def test_no_arguments_have_no_leaves():
    assert input_leaves({}) == []


def test_a_value_that_holds_itself_is_refused():
    items = []
    items.append(items)
    with pytest.raises(InputError, match="hold themselves"):
        input_leaves({"x": items})
    with pytest.raises(InputError, match="hold themselves"):
        map_tensors(items, torch.clone)


class TestRegisteredTypes:
    @pytest.fixture
    def box(self):
        class Box:
            def __init__(self, left, label):
                self.left, self.label = left, label

        return Box

    def test_objects_are_looked_into_and_rebuilt(self, box):
        value = box(ones(2), "a")
        assert described({"x": value}) == {"x": ("x", "unsupported")}
        kind = register_input_type(box, lambda b: {"left": b.left, "label": b.label}, lambda parts: box(**parts))
        assert kind is box
        assert described({"x": value}) == {
            "x.left": (("x", "left"), "tensor"),
            "x.label": (("x", "label"), "scalar"),
        }
        doubled = map_tensors([value], lambda tensor: tensor * 2)[0]
        assert (type(doubled), doubled.left.tolist(), doubled.label) == (box, [2, 2], "a")
        assert value.left.tolist() == [1, 1]

    def test_registering_again_replaces(self, box):
        register_input_type(box, lambda b: {"left": b.left}, lambda parts: box(**parts, label=None))
        described({"x": box(ones(1), 1)})
        register_input_type(box, lambda b: {"label": b.label}, lambda parts: box(None, **parts))
        assert described({"x": box(ones(1), 1)}) == {"x.label": (("x", "label"), "scalar")}

    def test_a_dataclass_may_be_registered_after_it_was_seen(self):
        @dataclasses.dataclass
        class Late:
            image: torch.Tensor
            note: object = None

        described({"x": Late(ones(1))})
        register_input_type(Late, lambda v: {"image": v.image}, lambda parts: Late(**parts))
        assert described({"x": Late(ones(1), Opaque())}) == {"x.image": (("x", "image"), "tensor")}

    @pytest.mark.parametrize("kind", [dict, list, torch.Tensor, nn.Parameter, int, Mode])
    def test_known_classes_are_refused(self, kind):
        with pytest.raises(InputError, match="is known already"):
            register_input_type(kind, dict, dict)

    def test_wrong_arguments_are_refused(self, box):
        with pytest.raises(InputError, match="expected a class, got a int"):
            register_input_type(3, dict, dict)
        with pytest.raises(InputError, match="have to be functions"):
            register_input_type(box, None, dict)

    def test_parts_without_names_are_refused(self, box):
        register_input_type(box, lambda b: [b.left], lambda parts: box(*parts))
        with pytest.raises(InputError, match="return the parts by name"):
            input_leaves({"x": box(ones(1), 1)})


def test_a_class_may_be_met_by_several_threads_at_once():
    def seen(kind):
        return sorted(leaf.access_path for leaf in input_leaves({"a": kind(1), "b": [kind(2)]}))

    with ThreadPoolExecutor(8) as pool:
        for number in range(50):
            kind = dataclasses.make_dataclass(f"Met{number}", ["x"])
            assert list(pool.map(seen, [kind] * 8)) == [["a.x", "b[0].x"]] * 8


class TestMapping:
    def test_the_structure_stays(self):
        frozen, user = Frozen(ones(1)), collections.UserDict(a=ones(1))
        value = {
            "b": [ones(1), (2, None)],
            "a": Request(ones(1), 3.0),
            "f": frozen,
            "u": user,
            "d": collections.defaultdict(list, z=ones(1)),
            "p": Pair(ones(1), "t"),
            "e": {},
        }
        mapped = map_tensors(value, lambda tensor: tensor + 1)
        assert list(mapped) == list(value)
        assert [type(part) for part in mapped.values()] == [type(part) for part in value.values()]
        assert mapped["b"] == [2, (2, None)]
        assert (mapped["a"].image, mapped["a"].scale) == (2, 3.0)
        assert (mapped["f"].image, mapped["u"]["a"], mapped["d"]["z"], mapped["p"].image) == (2, 2, 2, 2)
        assert mapped["d"].default_factory is list
        assert (frozen.image, user["a"]) == (1, 1)

    def test_a_tensor_in_two_places_stays_one(self):
        x = ones(1)
        mapped = map_tensors({"a": x, "b": [x, ones(1)]}, torch.clone)
        assert mapped["a"] is mapped["b"][0]
        assert mapped["a"] is not x
        assert mapped["b"][1] is not mapped["a"]

    def test_inputs_are_mapped_by_path_and_shared_where_the_same_is_asked(self):
        x = ones(1)
        asked = {("a",): 2, ("b", "c"): 2, ("d",): 3}
        mapped = map_inputs({"a": x, "b": {"c": x}, "d": x, "e": 5}, asked.get, lambda tensor, wish: tensor * wish)
        assert mapped == {"a": 2, "b": {"c": 2}, "d": 3, "e": 5}
        assert mapped["a"] is mapped["b"]["c"]


class TestLibraries:
    def test_model_outputs_are_reached_by_attribute_and_keep_what_is_absent(self):
        from transformers.modeling_outputs import BaseModelOutput

        output = BaseModelOutput(last_hidden_state=ones(1, 2), hidden_states=(ones(1), ones(1)))
        assert [leaf.access_path for leaf in output_leaves(output)] == [
            "output.last_hidden_state",
            "output.hidden_states[0]",
            "output.hidden_states[1]",
        ]
        mapped = map_tensors(output, lambda tensor: tensor + 1)
        assert type(mapped) is BaseModelOutput
        assert (
            mapped.last_hidden_state.tolist() == mapped["last_hidden_state"].tolist() == mapped[0].tolist() == [[2, 2]]
        )
        assert mapped.attentions is None
        assert mapped.to_tuple()[1] == (2, 2)
        assert output.last_hidden_state.tolist() == [[1, 1]]

    def test_outputs_of_diffusers_are_reached_by_attribute(self):
        from diffusers.utils.outputs import BaseOutput

        @dataclasses.dataclass
        class Sample(BaseOutput):
            sample: torch.Tensor

        output = Sample(sample=ones(1))
        assert [leaf.access_path for leaf in output_leaves(output)] == ["output.sample"]
        mapped = map_tensors(output, lambda tensor: tensor + 1)
        assert (mapped.sample, mapped["sample"], mapped[0]) == (2, 2, 2)

    def test_a_dynamic_cache_is_its_tensors(self):
        from transformers import DynamicCache

        cache = DynamicCache()
        assert [leaf.kind for leaf in input_leaves({"past": cache})] == ["scalar"]
        for layer in range(2):
            cache.update(ones(1, 2, 3, 4), ones(1, 2, 3, 4), layer)
        assert described({"past": cache}) == {
            f"past.layers[{layer}].{name}": (("past", "layers", layer, name), "tensor")
            for layer in range(2)
            for name in ("keys", "values")
        }
        mapped = map_tensors(cache, lambda tensor: tensor * 2)
        assert type(mapped) is DynamicCache
        assert mapped.get_seq_length() == 3
        mapped.update(ones(1, 2, 1, 4), ones(1, 2, 1, 4), 0)
        assert (mapped.get_seq_length(), cache.get_seq_length()) == (4, 3)
        assert cache.layers[0].keys.unique() == 1

    @pytest.mark.parametrize("has_layers", [False, True])
    def test_a_copy_of_a_cache_before_its_first_call_stays_empty(self, has_layers):
        from transformers import DynamicCache, LlamaConfig

        config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=2)
        cache = DynamicCache(config=config if has_layers else None)
        other = copied({"past": cache}, torch.clone)["past"]
        cache.update(ones(1, 2, 3, 4), ones(1, 2, 3, 4), 0)
        assert (cache.get_seq_length(), other.get_seq_length()) == (3, 0)
        other.update(ones(1, 2, 2, 4), ones(1, 2, 2, 4), 0)
        assert (cache.get_seq_length(), other.get_seq_length()) == (3, 2)

    def test_a_static_cache_is_its_tensors(self):
        from transformers import LlamaConfig, StaticCache

        config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=2)
        cache = StaticCache(config, max_cache_len=6)
        cache.update(ones(1, 2, 3, 4), ones(1, 2, 3, 4), 0)
        leaves = input_leaves({"past": cache})
        assert {leaf.kind for leaf in leaves} == {"tensor"}
        shapes = {leaf.path[-1]: list(leaf.value.shape) for leaf in leaves}
        assert shapes["keys"] == shapes["values"] == [1, 2, 6, 4]
        mapped = map_tensors(cache, torch.clone)
        mapped.update(ones(1, 2, 1, 4) * 5, ones(1, 2, 1, 4), 0)
        assert mapped.layers[0].keys[0, 0, :, 0].tolist() == [1, 1, 1, 5, 0, 0]
        assert cache.layers[0].keys[0, 0, :, 0].tolist() == [1, 1, 1, 0, 0, 0]

    @pytest.mark.slow
    def test_no_library_is_imported_for_it(self):
        code = (
            "import sys, torch; from perfladder.tuning.tree import input_leaves; "
            "input_leaves({'x': [object(), {'a': torch.ones(1)}]}); "
            "assert not {'transformers', 'diffusers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class TestBinding:
    def test_positional_arguments_get_names(self):
        assert bind(("x", "y"), (1,), {"y": 2}) == bind(("x", "y"), (1, 2), {}) == {"x": 1, "y": 2}
        assert list(bind(("x",), (1, 2, 3), {"k": 4})) == ["x", "args.0", "args.1", "k"]
        assert bind(("x", "y"), (), {"other": 1}) == {"other": 1}
        assert bind(("x",), (), {}) == {}

    def test_names_are_those_that_positions_fill(self):
        class Net(nn.Module):
            def forward(self, x, mask=None, *rest, scale=1.0, **others):
                return x

        assert parameter_names(Net().forward) == ("x", "mask")

    def test_partials_and_wrapped_functions_tell_what_is_left(self):
        def forward(x, y, z=1):
            return x

        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            return forward(*args, **kwargs)

        assert parameter_names(functools.partial(forward, 1)) == ("y", "z")
        assert parameter_names(functools.partial(forward, y=1)) == ("x",)
        assert parameter_names(wrapped) == ("x", "y", "z")
        assert parameter_names(functools.partial(wrapped, 1)) == ("y", "z")

    def test_a_function_that_tells_nothing_has_no_names(self):
        assert parameter_names(max) == ()


def test_a_copy_has_empty_containers_of_its_own():
    notes: list[str] = []
    options: dict[str, int] = {}
    handle = Opaque()
    other = copied({"notes": notes, "again": [notes], "options": options, "handle": handle}, torch.clone)
    notes.append("filled by the call")
    options["filled"] = 1
    assert (other["notes"], other["again"], other["options"]) == ([], [[]], {})
    assert other["notes"] is other["again"][0], "one object in two places"
    assert other["handle"] is handle
