"""Reasons of failed exports: the kind, what it is about, and what to do next. Messages are those of the libraries."""

import re

import pytest
import torch

from perfladder.backend.reasons import ParserFault, explain_export_failure, explain_parser_faults
from perfladder.errors import TuningError


class GuardOnDataDependentSymNode(Exception):
    pass


SHAPES = """Constraints violated (dim_h, dim_w)! For more information, run with TORCH_LOGS="+dynamic".
  - Not all values of dim_w = L['tensors'][0].size()[3] in the specified range 8 <= dim_w <= 64 satisfy the guard.
Suggested fixes:
  _dim_h = Dim('_dim_h', min=4, max=32)
  dim_h = 2*_dim_h
"""


@pytest.mark.parametrize(
    ("error", "kind", "next_step"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of memory", "dynamic_shapes"),
        (MemoryError(), "out of memory", "free memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory", "batch sizes"),
        (
            ModuleNotFoundError("No module named 'onnxscript.function_libs'"),
            "missing library: the library onnxscript",
            "pip install onnxscript",
        ),
        (OSError("libcublas.so.12: cannot open shared object file"), "missing library: .*libcublas", "install it"),
        (
            GuardOnDataDependentSymNode(
                "Could not guard on data-dependent expression Eq(u0, 1)\n\nThe following call raised this error:\n"
                '  File "/home/me/model.py", line 32, in forward\n    if x.sum() > 0: return x\n'
            ),
            r"data-dependent control flow: .* at `if x.sum\(\) > 0: return x` \(model.py:32\)",
            "torch.where",
        ),
        (RuntimeError(SHAPES), "shape constraint: the code takes multiples of 2 as h only", "dynamic_shapes"),
        (
            RuntimeError(
                "Constraints violated (dim_c)!\n  - You marked dim_c as dynamic but your code specialized it to be a "
                "constant (4). If you're using mark_dynamic, either remove it or use maybe_mark_dynamic."
            ),
            "shape constraint: the code works with c = 4 only",
            "a plain number",
        ),
        (
            RuntimeError("No ONNX function found for <OpOverload(op='aten._linalg_eigh', overload='default')>."),
            r"unsupported operator: aten\._linalg_eigh",
            "opset_version",
        ),
        (
            RuntimeError("Exporting the operator 'aten::fft_fft' to ONNX opset version 18 is not supported."),
            "unsupported operator: aten::fft_fft",
            "inductor_jit",
        ),
        (
            RuntimeError("[ONNXRuntimeError] : NOT_IMPLEMENTED : Could not find an implementation for Trilu(14) node"),
            r"unsupported operator: Trilu\(14\)",
            "opset_version",
        ),
    ],
)
def test_kinds_of_failures_and_what_to_do(error, kind, next_step):
    reason = explain_export_failure(error)
    told, _, remedy = reason.partition("Next: ")
    assert re.match(kind, told), reason
    assert next_step in remedy


def test_the_error_behind_an_error_is_looked_at():
    error = RuntimeError("export failed")
    error.__cause__ = MemoryError("std::bad_alloc")
    assert explain_export_failure(error).startswith("out of memory")


def test_other_failures_keep_their_first_line_without_colours():
    assert explain_export_failure(ValueError("\x1b[96mstep 3\x1b[0m failed.\nmore")) == "ValueError: step 3 failed"
    assert explain_export_failure(ValueError()) == "ValueError: no message"


def test_own_errors_keep_their_words():
    assert explain_export_failure(TuningError("as it is, out of memory")) == "as it is, out of memory"


def test_all_that_a_parser_refuses_is_told_by_kind():
    faults = [
        ParserFault("UNSUPPORTED_NODE", "Unique", "node_unique", "false"),
        ParserFault("INVALID_NODE", "DFT", "node_dft", 'creator && "Plugin not found, is the name correct?"'),
        ParserFault("INVALID_NODE", "MatMul", "node_matmul", "types differ\nand more"),
        ParserFault("MEM_ALLOC_FAILED", "", "node_large", "no room"),
    ]
    told = explain_parser_faults(faults)
    assert told.startswith("unsupported operator: Unique (node_unique): not supported; DFT (node_dft): creator &&")
    assert "refused model: MatMul (node_matmul): types differ. Next: try another opset_version" in told
    assert "out of memory: MEM_ALLOC_FAILED (node_large): no room. Next: narrow the ranges" in told
