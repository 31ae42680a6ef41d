"""Copies of recorded arguments are tensors of the same kind."""

import torch

from perfladder.tuning.samples import Sample


def test_an_ordinary_tensor_stays_one_in_inference_mode():
    ordinary = torch.ones(2)
    with torch.inference_mode():
        sample = Sample.of((ordinary, torch.ones(2)), {}, None)
        copies, _ = sample.fresh()
    assert [tensor.is_inference() for tensor in sample.args] == [False, True]
    assert [tensor.is_inference() for tensor in copies] == [False, True]


def test_copies_need_no_gradient_and_have_memory_of_their_own():
    tensor = torch.ones(2, requires_grad=True)
    (copy,), _ = Sample.of((tensor,), {}, None).fresh()
    assert not copy.requires_grad
    copy += 1
    assert torch.equal(tensor.detach(), torch.ones(2))
