import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfladder.kernels.signatures import CallSignature, key_of

CPU = torch.device("cpu")
X = torch.randn(2, 3, 4)


def signature(*args, **kwargs):
    return CallSignature.of((args, kwargs))


SAME_FORM = [((X,), {}), ((torch.zeros(2, 3, 4),), {}), ((torch.nn.Parameter(X),), {})]
OTHER_FORMS = [
    ((X.double(),), {}),
    ((torch.randn(2, 4, 3).transpose(1, 2),), {}),
    ((torch.randn(2, 3, 5),), {}),
    ((X, 0.5), {}),
    ((X,), {"scale": 0.5}),
    ((X,), {"scale": None}),
    ((X,), {"scale": 1}),
    ((X,), {"scale": 1.0}),
    ((X,), {"scale": True}),
    ((X, [1, 2]), {}),
    ((X, (1, 2)), {}),
    ((X, torch.float16), {}),
    ((X, "tanh"), {}),
]


@pytest.mark.parametrize("arguments", SAME_FORM)
def test_other_numbers_are_the_same_form(arguments):
    args, kwargs = arguments
    assert signature(*args, **kwargs) == signature(X)
    assert key_of(args, kwargs) == signature(X).key
    assert signature(X).test(args, kwargs)


def test_each_of_these_is_another_form():
    forms = [((X,), {}), *OTHER_FORMS]
    found = [signature(*args, **kwargs) for args, kwargs in forms]
    for number, one in enumerate(found):
        fitting = [place for place, (args, kwargs) in enumerate(forms) if one.test(args, kwargs)]
        keyed = [place for place, (args, kwargs) in enumerate(forms) if key_of(args, kwargs) == one.key]
        assert (fitting, keyed) == ([number], [number]), one.describe()


@pytest.mark.parametrize("arguments", [SAME_FORM[0], *OTHER_FORMS])
def test_a_form_comes_back_from_json_and_makes_examples_of_itself(arguments):
    args, kwargs = arguments
    first = signature(*args, **kwargs)
    again = CallSignature.model_validate_json(first.model_dump_json())
    assert again == first
    assert again.key == key_of(args, kwargs)
    example_args, example_kwargs = again.example(CPU)
    assert signature(*example_args, **example_kwargs) == first
    assert again.test(example_args, example_kwargs)


@pytest.mark.parametrize(
    "args", [(X.to_sparse(),), (X, object()), (X, float("nan")), (1, 2), (X, {"a": 1})], ids=["sparse", *"abcd"]
)
def test_what_cannot_be_told_has_no_signature_and_no_provider(args):
    assert signature(*args) is None
    assert not signature(X).test(args, {})
    assert key_of(args, {}) != signature(X).key


@given(st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_an_example_has_the_sizes_and_strides(sizes, is_transposed):
    tensor = torch.empty(sizes)
    tensor = tensor.transpose(0, -1) if is_transposed and sizes else tensor
    example = signature(tensor).example(CPU)[0][0]
    assert (example.shape, example.stride()) == (tensor.shape, tensor.stride())


def test_a_description_names_the_forms():
    told = signature(X, (1, 2), attn_mask=None, other=torch.randn(3, 2).T).describe()
    assert told == "float32 [2, 3, 4], (1, 2), attn_mask=None, other=float32 [2, 3] strides [1, 2]"


def test_infinite_numbers_survive_json():
    form = signature(X, value=float("-inf"))
    again = type(form).model_validate_json(form.model_dump_json())
    assert again == form
    assert again.key == key_of((X,), {"value": float("-inf")})
    assert again.key != key_of((X,), {"value": float("inf")})
