import logging

import pytest
import torch

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.workloads.construction import quiet_imports, resolve_device, resolve_dtype, seeded_construction

CPU = torch.device("cpu")


def test_same_seed_gives_same_weights():
    weights = []
    for seed in (0, 0, 1):
        with seeded_construction(CPU, torch.float32, seed):
            weights.append(torch.nn.Linear(4, 4).weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_modules_are_made_in_the_dtype_on_the_device():
    with seeded_construction(torch.device("meta"), torch.float16, 0):
        weight = torch.nn.Linear(4, 4).weight
    assert (weight.dtype, weight.device.type) == (torch.float16, "meta")


def test_random_state_and_default_dtype_are_restored_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded_construction(CPU, torch.bfloat16, 3):
        _ = torch.rand(1) / (1 // 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device == CPU


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_by_name_or_object(dtype):
    assert resolve_dtype(dtype) == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float17", "int32", "nn", torch.int64])
def test_dtype_that_no_weight_can_have_is_refused(dtype):
    with pytest.raises(InputError, match="dtype"):
        resolve_dtype(dtype)


def test_unknown_device_name_is_refused():
    with pytest.raises(InputError, match="gpu0"):
        resolve_device("gpu0")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_missing_device_is_not_possible_here():
    with pytest.raises(NotPossibleHereError, match="cuda"):
        resolve_device("cuda")


def test_quiet_imports_drops_known_warnings_but_no_error(caplog):
    logger = logging.getLogger("torchao")
    with quiet_imports():
        logger.warning("noise")
        logger.error("trouble")
        logging.getLogger("torch").warning("other")
    logger.warning("later")
    assert caplog.messages == ["trouble", "other", "later"]
