"""Measures of likeness, with values worked out by hand, and gates that use them."""

import math

import numpy as np
import pytest
import torch

import perfladder as pl
from perfladder.capturing.compare import Encoded
from perfladder.errors import InputError
from perfladder.tuning.quality import QualityGate, cosine, psnr, ssim


def encoded(value):
    return Encoded.of({"output": value})


def test_cosine_is_that_of_vectors():
    assert cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert cosine(np.array([[1.0, 2.0]]), np.array([[2.0, 4.0]])) == pytest.approx(1), "length does not count"
    assert cosine(np.array([1.0, 2.0]), np.array([-1.0, -2.0])) == pytest.approx(-1)
    assert cosine(np.zeros(3), np.zeros(3)) == 1
    assert cosine(np.zeros(3), np.ones(3)) == 0


def test_psnr_is_of_the_range_of_what_is_expected():
    expected = np.array([0.0, 10.0, 0.0, 10.0])
    assert psnr(expected, expected + 1) == pytest.approx(20), "error 1 of a range of 10: 20 log10(10)"
    assert psnr(expected, expected) == math.inf
    assert psnr(np.full(4, 3.0), np.full(4, 4.0)) == 0, "a constant has the range 1"


def test_ssim_knows_structure():
    generator = np.random.default_rng(0)
    image = generator.random((3, 32, 32))
    assert ssim(image, image) == pytest.approx(1)
    slightly, badly = (ssim(image, image + generator.normal(0, s, image.shape)) for s in (0.02, 0.5))
    assert 0.95 < slightly < 1
    assert badly < 0.6
    assert ssim(image, 1 - image) < 0
    last = np.moveaxis(image, 0, -1)
    assert ssim(last, last[:, ::-1]) == pytest.approx(ssim(image, image[..., ::-1])), "channels may come last"


@pytest.mark.parametrize("shape", [(32,), (10, 32), (8, 10, 3)])
def test_ssim_needs_images(shape):
    with pytest.raises(InputError, match="ssim needs images of at least 11 by 11, not an array of"):
        ssim(np.ones(shape), np.ones(shape))


def test_the_worst_tensor_counts():
    expected = {"a": torch.ones(4), "b": torch.tensor([1.0, 0.0]), "count": torch.tensor([3]), "text": "x"}
    found = {"a": torch.ones(4), "b": torch.tensor([1.0, 1.0]), "count": torch.tensor([4]), "text": "y"}
    assert QualityGate("cosine").value_of(encoded(expected), encoded(found)) == pytest.approx(math.sqrt(0.5))


def test_half_precision_and_arrays_are_numbers_too():
    gate = QualityGate("psnr", 20)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor([0.0, 8.0], dtype=dtype)
        assert gate.value_of(encoded(x), encoded(x + 1)) == pytest.approx(20 * math.log10(8))
    x = np.array([0.0, 8.0], dtype=np.float32)
    assert gate.value_of_objects(x, x + 1) == pytest.approx(20 * math.log10(8))


def test_what_is_empty_or_the_same_without_being_finite_is_left_out():
    odd = torch.tensor([math.nan, -math.inf, 0.0, 10.0])
    expected, found = [torch.ones(0, 3), odd], [torch.ones(0, 3), odd + torch.tensor([0.0, 0.0, 1.0, 1.0])]
    assert QualityGate("psnr").value_of(encoded(expected), encoded(found)) == pytest.approx(20)
    assert QualityGate("cosine").value_of(encoded(expected), encoded(expected)) == pytest.approx(1)
    image = torch.rand(16, 16)
    masked = image.clone()
    masked[0, 0] = math.nan
    assert QualityGate("ssim").value_of(encoded(masked), encoded(masked.clone())) == pytest.approx(1)
    for metric in ("psnr", "cosine", "ssim"):
        assert QualityGate(metric).value_of(encoded(image), encoded(masked)) == -math.inf, "on one side only"
        with pytest.raises(InputError, match="holds no numbers"):
            QualityGate(metric).value_of(encoded(torch.ones(0, 16)), encoded(torch.ones(0, 16)))


def test_complex_numbers_are_measured_by_their_parts():
    expected = torch.tensor([0 + 0j, 10 + 10j], dtype=torch.complex64)
    assert QualityGate("psnr").value_of(encoded(expected), encoded(expected + (1 + 1j))) == pytest.approx(20)
    assert QualityGate("psnr").value_of_objects(expected.conj(), expected.conj() + (1 + 1j)) == pytest.approx(
        20 * math.log10(20)
    )


def test_errors_of_very_large_numbers_have_a_size():
    expected = torch.tensor([0.0, 1e200], dtype=torch.float64)
    assert QualityGate("psnr").value_of(encoded(expected), encoded(expected * 1.1)) == pytest.approx(
        20 + 10 * math.log10(2)
    )


def test_an_output_without_numbers_cannot_be_measured():
    with pytest.raises(InputError, match="holds no numbers that cosine could measure"):
        QualityGate().value_of_objects(["a text"], ["another"])


def test_a_function_gets_lists_of_tensors_or_the_whole_output():
    seen = []

    def likeness(expected, found):
        seen.append((expected, found))
        return np.float32(0.5)

    gate = QualityGate(likeness, 0.4)
    assert gate.name == "likeness"
    assert gate.value_of(encoded((torch.ones(2), 3)), encoded((torch.zeros(2), 4))) == 0.5
    assert [[array.tolist() for array in side] for side in seen[0]] == [[[1, 1]], [[0, 0]]]
    assert gate.value_of_objects("plain", "candidate") == 0.5
    assert seen[1] == ("plain", "candidate")


@pytest.mark.parametrize("value", [None, "good", True, torch.tensor(1.0)])
def test_a_function_has_to_return_a_number(value):
    with pytest.raises(InputError, match=r"quality: .* returned a .*, not a number"):
        QualityGate(lambda expected, found: value).value_of_objects(1, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metric": "mse"}, "metric: expected one of cosine, psnr, ssim, or a function; got 'mse'"),
        ({"metric": None}, "metric: .* got None"),
        ({"minimum": "0.9"}, "minimum: expected a number, got '0.9'"),
        ({"minimum": math.nan}, "minimum: expected a number, got nan"),
        ({"minimum": True}, "minimum: expected a number, got True"),
    ],
)
def test_wrong_gates_are_named(options, says):
    with pytest.raises(InputError, match=says):
        pl.QualityGate(**options)
