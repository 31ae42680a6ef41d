"""How alike two outputs are, for candidates whose numbers differ by design."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from perfladder.capturing.compare import Encoded
from perfladder.errors import InputError
from perfladder.tuning.tree import output_leaves

Metric = Literal["cosine", "psnr", "ssim"]
_METRICS: Final = ("cosine", "psnr", "ssim")
_SSIM_SIGMA: Final = 1.5
_SSIM_RADIUS: Final = 5


@dataclass(frozen=True)
class QualityGate:
    """The least likeness of a candidate's output to the plain one.

    Args:
        metric: `cosine` (similarity, at most 1), `psnr` (dB, of the range of the plain output), `ssim` (of images, at
            most 1), or a function of the plain output and the candidate's that returns a number, higher for more alike.
        minimum: The least accepted value.

    Raises:
        InputError: There is no such metric, or the minimum is no number.
    """

    metric: Metric | Callable[[Any, Any], float] = "cosine"
    minimum: float = 0.99

    def __post_init__(self) -> None:
        if not callable(self.metric) and self.metric not in _METRICS:
            raise InputError(f"metric: expected one of {', '.join(_METRICS)}, or a function; got {self.metric!r}.")
        if isinstance(self.minimum, bool) or not isinstance(self.minimum, (int, float)) or math.isnan(self.minimum):
            raise InputError(f"minimum: expected a number, got {self.minimum!r}.")

    @property
    def name(self) -> str:
        """Of the metric."""
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "the quality metric")

    @property
    def demand(self) -> str:
        """What it asks for, in words."""
        return f"{self.name} >= {self.minimum:.8g}"

    def why_not(self, value: float, *, where: str = "") -> str | None:
        """Why a value is not good enough; None if it is. One that is no number at all is not."""
        if value >= self.minimum:
            return None
        return f"{self.name}{where} is {value:.8g}, below {self.minimum:.8g}"

    def value_of(self, expected: Encoded, found: Encoded) -> float:
        """The worst value over all tensors that `is_measured`; a function gets outputs as lists of them.

        Raises:
            InputError: The function returned no number.
        """
        sides = _encoded_numbers(expected), _encoded_numbers(found)
        if not isinstance(self.metric, str):
            return self.value_of_objects(*(list(side.values()) for side in sides))
        return self._worst(*sides)

    def value_of_objects(self, expected: Any, found: Any) -> float:
        """The value for two outputs of a whole pipeline, as they are for a function."""
        if isinstance(self.metric, str):
            return self._worst(_object_numbers(expected), _object_numbers(found))
        value = self.metric(expected, found)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
            raise InputError(f"quality: {self.name} returned a {type(value).__name__}, not a number.")
        return float(value)

    def _worst(self, expected: Mapping[Any, np.ndarray], found: Mapping[Any, np.ndarray]) -> float:
        """The least value over all arrays; one that is not there, or has another shape, is as unlike as can be."""
        measure = {"cosine": cosine, "psnr": psnr, "ssim": ssim}[str(self.metric)]
        values = []
        for path, array in expected.items():
            other = found.get(path)
            if other is None or other.shape != array.shape:
                values.append(-math.inf)
                continue
            array, other = _without_same_non_finite(array, other, keeps_shape=self.metric == "ssim")
            if not (np.isfinite(array).all() and np.isfinite(other).all()):
                values.append(-math.inf)
            elif array.size:
                values.append(measure(array, other))
        if not values:
            raise InputError(f"quality: the output holds no numbers that {self.name} could measure.")
        return min(values)


def _without_same_non_finite(
    expected: np.ndarray, found: np.ndarray, *, keeps_shape: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays without the places where both are NaN, or infinite alike: an attention mask is no difference."""
    is_same = ~np.isfinite(expected) & ((expected == found) | (np.isnan(expected) & np.isnan(found)))
    if not is_same.any():
        return expected, found
    if keeps_shape:
        return np.where(is_same, 0.0, expected), np.where(is_same, 0.0, found)
    return expected[~is_same], found[~is_same]


def cosine(expected: np.ndarray, found: np.ndarray) -> float:
    """Cosine similarity of two arrays as vectors; 1 for two of zeros."""
    norms = float(np.linalg.norm(expected) * np.linalg.norm(found))
    if norms == 0:
        return float(np.array_equal(expected, found))
    return float(np.dot(expected.ravel(), found.ravel()) / norms)


def psnr(expected: np.ndarray, found: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB, of the range of `expected`; infinite for equal arrays."""
    peak = float(expected.max() - expected.min()) or 1.0
    error = float(np.mean(((expected - found) / peak) ** 2))
    return -10 * math.log10(error) if error > 0 else math.inf


def ssim(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean structural similarity of two arrays whose last two axes, [H, W] or [H, W, 1 to 4], are images.

    Source:
        Wang, Bovik, Sheikh and Simoncelli (2004), "Image Quality Assessment", with its constants (0.01, 0.03), and a
        Gaussian window of 11 pixels and standard deviation 1.5.
    """
    from scipy.ndimage import gaussian_filter

    axes = (-3, -2) if expected.ndim > 2 and expected.shape[-1] <= 4 else (-2, -1)
    if expected.ndim < 2 or min(expected.shape[axis] for axis in axes) < 2 * _SSIM_RADIUS + 1:
        raise InputError(f"quality: ssim needs images of at least 11 by 11, not an array of {list(expected.shape)}.")
    sigma = [0.0] * expected.ndim
    for axis in axes:
        sigma[axis] = _SSIM_SIGMA

    def blurred(values: np.ndarray) -> np.ndarray:
        result: np.ndarray = gaussian_filter(values, sigma, truncate=_SSIM_RADIUS / _SSIM_SIGMA)
        return result

    peak = float(expected.max() - expected.min()) or 1.0
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    mean_x, mean_y = blurred(expected), blurred(found)
    variance_x, variance_y = blurred(expected**2) - mean_x**2, blurred(found**2) - mean_y**2
    covariance = blurred(expected * found) - mean_x * mean_y
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    below = (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    return float(np.mean(above / below))


def _encoded_numbers(values: Encoded) -> dict[str, np.ndarray]:
    """Tensors and arrays whose numbers can be measured."""
    found = {path: values.tensor(leaf) for path, leaf in values.leaves.items() if leaf.kind in ("tensor", "array")}
    return {path: _doubles(tensor) for path, tensor in found.items() if is_measured(dtype_name(tensor))}


def _object_numbers(output: Any) -> dict[Any, np.ndarray]:
    """The same of live values; a picture of Pillow is an array of bytes."""
    found = {}
    for leaf in output_leaves(output):
        value = leaf.value
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu()
        elif hasattr(value, "__array_interface__"):
            array = torch.from_numpy(np.array(value))
        else:
            continue
        if is_measured(dtype_name(array)):
            found[leaf.path] = _doubles(array)
    return found


def is_measured(dtype: str) -> bool:
    """Whether numbers of a dtype, such as `float16`, can be measured: floating point, complex, and bytes."""
    return "float" in dtype or "complex" in dtype or dtype == "uint8"


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype of a tensor as tables of dtypes have it, such as `float16`."""
    return str(tensor.dtype).removeprefix("torch.")


def _doubles(tensor: torch.Tensor) -> np.ndarray:
    """The numbers as `float64`; complex ones have their two parts on a last axis."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    array: np.ndarray = tensor.double().numpy()
    return array
