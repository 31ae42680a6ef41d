"""When the output of a whole workload counts as what it was."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from perfladder.tuning.quality import QualityGate
from perfladder.tuning.whole_output import compare_output, encode_output, not_compared


def compared(expected, found, gate=None):
    return compare_output(encode_output(expected), encode_output(found), gate)


def picture(value, mode="RGB"):
    pixels = np.full((16, 16) if mode in "LP" else (16, 16, 3), 100, dtype=np.uint8)
    pixels[0, 0] = value
    return Image.fromarray(pixels, mode=None if mode != "P" else "P")


@dataclass
class Output:
    images: object
    tokens: tuple


def test_the_same_output_is_right_to_the_bit():
    output = {"x": torch.tensor([1.0, float("nan")]), "text": "a", "n": 3}
    found = compared(output, dict(output))
    assert (found.reason, found.max_abs_error, found.max_rel_error, found.quality) == (None, 0.0, 0.0, None)


@pytest.mark.parametrize("make", [torch.tensor, lambda values: np.array(values, dtype=np.float32)])
def test_numbers_in_tensors_and_arrays_may_differ_within_the_tolerance_of_their_dtype(make):
    found = compared([make([1.0, 2.0])], [make([1.0, 2.0001])])
    assert found.reason is None
    assert found.max_rel_error == pytest.approx(5e-5, rel=0.01)
    wrong = compared([make([1.0, 2.0])], [make([1.0, 2.001])])
    assert wrong.reason == "output.0: largest error 0.001 (0.0005 of the largest value)"


def test_complex_numbers_have_the_tolerance_of_their_parts_or_a_gate():
    expected = [torch.tensor([1 + 1j, 2.0]), torch.ones(0)]
    found = [torch.tensor([1 + 1.0001j, 2.0]), torch.ones(0)]
    assert compared(expected, found).reason is None
    assert "largest error" in compared(expected, [2 * expected[0], expected[1]]).reason
    assert compared(expected, found, QualityGate("psnr", 40)).quality > 80


def test_a_picture_may_differ_by_one_level():
    found = compared(Output([picture(7)], (1,)), Output([picture(8)], (1,)))
    assert (found.reason, found.max_abs_error) == (None, 1.0)
    assert "largest error 2 of 255 levels" in compared([picture(7)], [picture(9)]).reason


@pytest.mark.parametrize(("dtype", "is_right"), [("float16", True), ("bfloat16", True), ("float32", False)])
def test_what_modules_compute_in_is_how_exact_a_result_can_be(dtype, is_right):
    def reason(expected, found):
        return compare_output(encode_output(expected), encode_output(found), None, computed_in={"int64", dtype}).reason

    assert (reason(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01])) is None) == is_right
    assert (reason(picture(7), picture(9)) is None) == is_right
    assert reason(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])) is not None
    assert reason(torch.tensor([1]), torch.tensor([2])) is not None


def test_bytes_that_are_no_picture_have_to_be_the_same():
    masks = torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)
    assert "largest error 1 of 255 levels" in compared(*masks).reason
    assert compared(picture(7, "P"), picture(8, "P")).reason is not None


@pytest.mark.parametrize(
    ("expected", "found", "reason"),
    [
        (torch.zeros(2), torch.zeros(3), "float32 [2] became float32 [3]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "became float64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values differ"),
        ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)], "only in the tuned one"),
        ({"n": 3}, {"n": 4}, "3 became 4"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "NaN or infinite on one side only"),
        (picture(7), picture(7, "L"), "became"),
    ],
)
def test_another_form_is_wrong_with_a_gate_too(expected, found, reason):
    for gate in (None, QualityGate("cosine", -1.0)):
        assert reason in compared(expected, found, gate).reason


def test_a_gate_measures_what_is_beyond_tolerances():
    expected, found = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.1])
    assert compared(expected, found).reason is not None
    right = compared(expected, found, QualityGate("cosine", 0.99))
    assert (right.reason, right.quality) == (None, pytest.approx(0.9989, abs=1e-3))
    assert compared(expected, found, QualityGate("cosine", 0.9999)).reason.startswith("cosine is 0.99")


def test_a_gate_stands_in_place_of_the_tolerances():
    expected, found = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])
    assert compared(expected, found).quality is None
    right = compared(expected, found, QualityGate("psnr", 40))
    assert (right.reason, right.quality) == (None, pytest.approx(83, abs=0.1))
    assert compared(expected, found, QualityGate("psnr", 90)).reason.startswith("psnr is 83")


def test_a_gate_measures_pictures():
    assert compared([picture(200)], [picture(190)], QualityGate("psnr", 40)).reason is None
    assert "psnr is" in compared([picture(200)], [picture(100)], QualityGate("psnr", 40)).reason


def test_parts_that_no_comparison_sees_are_named():
    assert not_compared(encode_output({"x": 1, "handle": object()})) == ["output.handle"]
    assert not_compared(encode_output(None)) == not_compared(encode_output([])) == ["output, which holds nothing"]
    assert not_compared(encode_output(0)) == []
