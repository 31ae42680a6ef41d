"""The one table of kernel families: what a kernel does, by its name and, as second evidence, by its operator.

The first rule that fits decides. Names are those that CUPTI, roctracer and torch write; tests read them from recorded
windows. A name that no rule knows belongs to its operator's family, and to `other` if that is unknown too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from perfladder.trace.model import Category, IntArray
from perfladder.trace.runtime_calls import is_communication
from perfladder.trace.sums import number_combinations, sum_by

if TYPE_CHECKING:
    from perfladder.trace.kernels import KernelTable


class Family(StrEnum):
    """What a kernel or operator does."""

    GEMM = "gemm"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    NORMALIZATION = "normalization"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    COPY = "copy"
    LAYOUT = "layout"
    COMMUNICATION = "communication"
    OTHER = "other"


FAMILIES: Final = tuple(Family)


class Rule(NamedTuple):
    """A name that contains the pattern belongs to the family.

    Attributes:
        family: The family.
        pattern: Searched for in the name, whatever its case.
        source: Whose names these are.
        why: What in the name tells it, and why the rule stands where it stands.
    """

    family: Family
    pattern: re.Pattern[str]
    source: str
    why: str


def _rule(family: Family, pattern: str, source: str, why: str) -> Rule:
    return Rule(family, re.compile(pattern, re.IGNORECASE), source, why)


_TRANSFERS: Final = ("Memcpy ", "Memset ", "Copy")
"""How names of copies and fills begin that are no kernels."""
_COMPILED: Final = re.compile(r"^(void )?(triton_|nvfuser_|CudaCodeGen::|fused_|__myl_)")
"""Names that Inductor, nvFuser, TorchScript's fusers and TensorRT give to the kernels that they write."""
_UNFUSED: Final = (Family.NORMALIZATION, Family.ELEMENTWISE, Family.REDUCTION, Family.COPY)
"""What a compiler fuses with its neighbours."""
_NORMS: Final = r"(layer|group|batch|instance|rms)_?norm"

KERNEL_RULES: Final = (
    # Inductor's names list every fused operator, so what the kernel is stands in the prefix alone.
    _rule(Family.ATTENTION, r"^triton_tem_.*attention", "Inductor template kernels", "flex attention"),
    _rule(Family.CONVOLUTION, r"^triton_tem_.*conv", "Inductor template kernels", "a convolution template"),
    _rule(Family.GEMM, r"^triton_(tem|mm|bmm)_", "Inductor template kernels", "the other templates multiply matrices"),
    _rule(
        Family.NORMALIZATION,
        rf"^triton_(red|per)_.*({_NORMS}|var_mean|rsqrt)",
        "Inductor reduction kernels",
        "a fused norm: its statistics are the reduction",
    ),
    _rule(Family.REDUCTION, r"^triton_(red|per|split_scan)_", "Inductor kernels", "reduction, persistent or looped"),
    _rule(Family.ELEMENTWISE, r"^triton_(poi|for)_", "Inductor kernels", "pointwise, or several of them (foreach)"),
    _rule(
        Family.ATTENTION,
        r"fmha|flash_?(fwd|bwd|fprop|bprop|attn|attention|decod)|native_sdpa|AttentionKernel"
        r"|Attention(Backward|Forward)|paged_attention|attn_(fwd|bwd)|SageAttn|qk_int8_sv",
        "ATen memory-efficient attention, FlashAttention 2 and 3, cuDNN, FlashInfer, SageAttention",
        "before convolution and GEMM: cuDNN names it flash_fprop, ATen fmha_cutlassF",
    ),
    _rule(
        Family.LAYOUT,
        r"ncd?hw_?(to|2)_?nd?hwc|nd?hwc_?(to|2)_?ncd?hw|batched_transpose_\d+x\d+",
        "cuDNN (nchwToNhwcKernel, nhwcToNchwKernel), MIOpen",
        "before convolution, around which they only change the order of a tensor's elements",
    ),
    _rule(
        Family.CONVOLUTION,
        r"fprop|wgrad|dgrad|convolve|convolution|winograd|conv_?[123]d|conv_depthwise|implicit_gemm|im2col|vol2col"
        r"|kern_precompute_indices|naive_conv|miopen.*conv",
        "cuDNN (sm80_xmma_fprop_implicit_gemm_..._cudnn, implicit_convolve_sgemm, winograd_nonfused), ATen, MIOpen",
        "before GEMM: convolutions are implicit GEMMs",
    ),
    _rule(
        Family.NORMALIZATION,
        rf"{_NORMS}|RowwiseMoments|ComputeFusedParams|GammaBeta|cudnn::bn_|bn_(fw|bw)_|LNForward|ln_(fwd|bwd)",
        "ATen layer_norm_kernel.cu and group_norm_kernel.cu, cuDNN, Apex, Transformer Engine",
        "before elementwise and reduction: ATen applies a norm by an elementwise kernel of its name",
    ),
    _rule(
        Family.GEMM,
        r"gemm|gemv|nvjet|cublas|cutlass|xmma|wgmma|matmul|split_?k_?reduce|scal_kernel|Cijk_|dot_kernel|gett_|marlin"
        r"|(^|_)b?mm_",
        "cuBLAS and cuBLASLt (nvjet_*, sm80_xmma_gemm_*, splitKreduce, epilogues), CUTLASS, hipBLASLt (Cijk_)",
        "before reduction: split-k partial sums are part of the product",
    ),
    _rule(
        Family.COPY,
        r"direct_copy_kernel|CatArrayBatchedCopy|copy_kernel|copy_device_to_device|FillFunctor|fill_kernel"
        r"|index(Select|_elementwise|_copy|FuncLargeIndex|_kernel)|index_put|gather_kernel|scatter_kernel|embedding"
        r"|transpose_?(kernel|readWrite)|batch_transpose|tril|triu|roll_cuda|flip_kernel|pad(_|ding)",
        "ATen Copy.cu, Shape.cu, Indexing.cu, FillKernel.cu",
        "before elementwise, whose templates these use: they move or fill, and compute nothing",
    ),
    _rule(
        Family.REDUCTION,
        r"reduce_kernel|ReduceKernel|softmax|DeviceReduce|DeviceScan|radixSort|DeviceSegmented|bitonicSort|topk|argm(ax|in)"
        r"|cumsum|scan_(inner|outer)|multi_block_reduce|cub::",
        "ATen Reduce.cuh, SoftMax.cu, CUB",
        "a softmax is two reductions and a quotient; sorts and scans go with them",
    ),
    _rule(
        Family.ELEMENTWISE,
        r"elementwise|pointwise|multi_tensor_apply|distribution|upsample|activation|silu|gelu|rotary|rope|dropout"
        r"|CUDAFunctor|glu_|arange|avg_?pool|max_?pool",
        "ATen Loops.cuh, ForeachFunctors.cuh, UpSample.cu, DistributionTemplates.h; vLLM activation kernels",
        "one result for each element or small window",
    ),
)

OPERATOR_RULES: Final = (
    _rule(Family.COMMUNICATION, r"^(c10d|gloo|nccl|_c10d_functional)", "torch.distributed", "collectives"),
    _rule(
        Family.ATTENTION,
        r"scaled_dot_product|(flash|efficient|cudnn)_attention|multi_?head_attention|flex_attention|attn_func",
        "aten, xformers, flash_attn",
        "before GEMM, which it is made of",
    ),
    _rule(Family.CONVOLUTION, r"conv|im2col|vol2col|nnpack", "aten, mkldnn", "aten::mkldnn_convolution and the like"),
    _rule(Family.NORMALIZATION, rf"{_NORMS}|weight_norm|normalize$", "aten", "before reduction: linalg norms are sums"),
    _rule(
        Family.GEMM,
        r"::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|dot|vdot|inner|einsum|scaled_mm|int_mm|grouped_mm"
        r"|scaled_grouped_mm|addmm_activation|weight_int\w+|mkl_linear|mkldnn_linear|linear_pointwise|dyn_quant_\w+)_?$",
        "aten, mkl, mkldnn",
        "whole names: aten::mul is none",
    ),
    _rule(
        Family.COPY,
        r"::_?(copy|to_copy|to|clone|contiguous|cat|stack|index|index_select|index_put|index_copy|gather|scatter\w*"
        r"|embedding\w*|fill|zero|zeros\w*|ones\w*|full\w*|pad|constant_pad_nd|reflection_pad\w*|replication_pad\w*"
        r"|repeat\w*|roll|flip|item|local_scalar_dense|masked_select|take\w*|tril|triu|pin_memory|pixel_(un)?shuffle)_?$",
        "aten",
        "moves or fills, computes nothing",
    ),
    _rule(
        Family.REDUCTION,
        r"::_?(sum|mean|max|min|amax|amin|aminmax|argmax|argmin|(log_)?(safe_)?softmax|logsumexp|var|var_mean|std"
        r"|std_mean|prod|any|all|topk|sort|argsort|cumsum|cumprod|norm|linalg_vector_norm|median|unique\w*|multinomial"
        r"|bincount|histc|searchsorted)_?$",
        "aten",
        "softmax as above",
    ),
    _rule(
        Family.OTHER,
        r"::_?(empty\w*|new_empty\w*|resize\w*|view\w*|unsafe_view|reshape\w*|expand\w*|as_strided|transpose|permute|t"
        r"|unsqueeze|squeeze|select|slice|narrow|split\w*|chunk|unbind|flatten|unflatten|detach|alias|set|lift_fresh"
        r"|result_type|resolve_(conj|neg)|is_nonzero)_?$|^detach_?$",
        "aten",
        "allocates or looks at memory in another shape: no element is touched",
    ),
    _rule(Family.NORMALIZATION, rf"cpp_fused.*({_NORMS}|var_mean)", "Inductor for CPUs", "a fused norm"),
    _rule(Family.ELEMENTWISE, r"cpp_fused", "Inductor for CPUs", "mostly pointwise; the name lists what is fused"),
    _rule(
        Family.ELEMENTWISE,
        r"::_?(r?sub|add|mul|div|addcmul|addcdiv|lerp|pow|square|sqrt|rsqrt|exp\w*|log\w*|sin|cos|tan|abs|neg|sign|floor"
        r"|ceil|round|trunc|clamp\w*|minimum|maximum|fmod|remainder|where|masked_fill|sigmoid|tanh|silu|gelu|relu\w*"
        r"|leaky_relu|elu|hardswish|hardtanh|mish|softplus|glu|erf|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|isinf"
        r"|reciprocal|dropout\w*|native_dropout|arange|linspace|rand\w*|normal|uniform|bernoulli|exponential|upsample\w*"
        r"|adaptive_\w*pool\w*|avg_pool\w*|max_pool\w*|threshold|foreach_\w+|complex|polar|cast)_?$",
        "aten",
        "one result for each element or small window",
    ),
)


def _first(rules: tuple[Rule, ...], name: str) -> Family | None:
    return next((rule.family for rule in rules if rule.pattern.search(name)), None)


@lru_cache(maxsize=4096)
def classify_operator(name: str) -> Family:
    """Return the family of an operator by its name, e.g. `aten::addmm`."""
    return _first(OPERATOR_RULES, name) or Family.OTHER


@lru_cache(maxsize=8192)
def classify_kernel(name: str, operator: str | None = None) -> Family:
    """Return the family of a kernel, copy or fill by its name and the operator that launched it.

    The operator decides where the name says nothing, and where a convolution is done by a plain matrix product.
    """
    if name.startswith(_TRANSFERS):
        return Family.COPY
    if is_communication(name):
        return Family.COMMUNICATION
    by_name = _first(KERNEL_RULES, name)
    by_operator = classify_operator(operator) if operator is not None else Family.OTHER
    if by_name is None or (by_name is Family.GEMM and by_operator is Family.CONVOLUTION):
        return by_operator
    return by_name


def is_compiled_kernel(name: str) -> bool:
    """Whether a compiler wrote the kernel, by its name."""
    return _COMPILED.match(name) is not None


def unfused_family(name: str) -> Family | None:
    """Return the family of a kernel that passes over memory for one operator alone, which a compiler could fuse.

    None for all others: products, attention and convolutions, copies and fills that are no kernels, what a compiler
    wrote, and names that no rule knows.
    """
    if is_compiled_kernel(name) or name.startswith(_TRANSFERS):
        return None
    family = classify_kernel(name)
    return family if family in _UNFUSED else None


def families_of(table: KernelTable) -> IntArray:
    """Return, for each entry of the table, the index of its family in `FAMILIES`."""
    trace, forest = table.trace, table.trace.forest
    name = trace.name_id[table.event]
    if not table.num_kernels:
        return np.empty(0, np.int8)
    if table.is_host:
        by_name = [FAMILIES.index(classify_operator(text)) for text in trace.names]
        return np.array(by_name, np.int8)[name]
    has_operator = table.operator >= 0
    operator = np.full(table.num_kernels, -1, np.int64)
    operator[has_operator] = forest.name_id[table.operator[has_operator]]
    is_copy = np.isin(trace.category[table.event], (Category.GPU_MEMCPY, Category.GPU_MEMSET))
    code, size = number_combinations((name, operator, is_copy.astype(np.int8)), table.num_kernels)
    first = np.full(size, -1, np.int64)
    first[code[::-1]] = np.arange(table.num_kernels - 1, -1, -1)
    found = []
    for index in first.tolist():
        called = trace.names[operator[index]] if operator[index] >= 0 else None
        if is_copy[index]:
            family = Family.COPY
        else:
            family = classify_kernel(trace.names[name[index]], called)
        found.append(FAMILIES.index(family))
    return np.array(found, np.int8)[code]


def families_of_groups(
    table: KernelTable, entries: IntArray, group: IntArray, operators: Sequence[str]
) -> list[Family]:
    """Return each group's family: that which most of its kernels' time is of, or on a CPU that of its operator.

    A convolution is one even where changing the layout around it takes longer.

    Args:
        table: The kernels.
        entries: Those of its entries that are in a group.
        group: The group of each of these.
        operators: The operator that each group goes by.
    """
    if table.is_host:
        return [classify_operator(name) for name in operators]
    code = group.astype(np.int64) * len(FAMILIES) + families_of(table)[entries]
    size = len(operators) * len(FAMILIES)
    totals = sum_by(code, table.duration_ns[entries], size).reshape(len(operators), len(FAMILIES))
    layout, convolution = FAMILIES.index(Family.LAYOUT), FAMILIES.index(Family.CONVOLUTION)
    serves = totals[:, convolution] > 0
    totals[serves, convolution] += totals[serves, layout]
    totals[serves, layout] = 0
    return [FAMILIES[index] for index in totals.argmax(axis=1).tolist()]
