"""Which kernel is worth a look, and which launch of its function it is."""

import pytest
from backgrounds import make_background

from perfladder.errors import InputError
from perfladder.findings.nsight import kernel_question
from perfladder.nsight.question import heaviest_kernel, launch_index, open_question, refuse_communication
from perfladder.profiling.shares import Share
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.critical import Boundness
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.ranking import RankedGroup


def kernel(name, share, category="kernel", operator="aten::mm"):
    row = {"operator": operator, "outer_operator": operator, "function": None, "region": "r:stage", "example_event": 0}
    return KernelSummary(kernel=name, category=category, count=4, total_us=share, mean_us=0.1, share=share, **row)


def seen(*rows, achieved=None, verdict="device", kind="kernels"):
    group = {
        "region_id": "r:stage",
        "operator": "aten::mm",
        "family": "gemm",
        "count": 4,
        "total_us": 1.0,
        "share": 1.0,
    }
    ranked = RankedGroup(**group, critical_us=1.0, achieved_frac=achieved, possible_win_us=0.5, reason="-")
    shares = [Share(name=row.kernel, total_us=row.total_us, share=row.share, count=row.count) for row in rows]
    bound = Boundness.model_construct(verdict=verdict)
    return KernelsResult(
        stage="stage", kind=kind, repeats=3, kernels=list(rows), by_kernel=shares, ranking=[ranked]
    ).model_copy(update={"bound": bound})


def test_the_heaviest_kernel_far_from_its_roof_is_a_question():
    result = seen(kernel("gemm", 0.6), kernel("add", 0.3), achieved=0.4)
    assert open_question(result).name == "gemm"
    (finding,) = kernel_question(result, make_background())
    assert finding.kind == "kernel_question"
    assert "Kernel gemm holds 60% of the kernel time, in 4 launches a call, and it reaches 40%" in finding.claim
    assert [evidence.value for evidence in finding.evidence] == [0.6, 0.4]


@pytest.mark.parametrize(
    "result",
    [
        seen(kernel("gemm", 0.6), achieved=0.9),
        seen(kernel("gemm", 0.05), achieved=0.4),
        seen(kernel("gemm", 0.6), achieved=0.4, verdict="host"),
        seen(kernel("aten::mm", 0.6, category="cpu_op"), achieved=0.4, kind="operators"),
        seen(kernel("Memcpy HtoD (Pageable -> Device)", 0.9, category="gpu_memcpy")),
    ],
    ids=["near its roof", "too small", "the host sets the pace", "no kernels", "a copy"],
)
def test_without_a_question_there_is_no_finding(result):
    assert open_question(result) is None
    assert kernel_question(result, make_background()) == []


def test_a_kernel_whose_work_is_unknown_is_a_question():
    (finding,) = kernel_question(seen(kernel("triton_red_fused_0", 0.5, operator="mine::op")), make_background())
    assert "how near it is to its roof is unknown" in finding.claim


def test_communication_and_copies_are_passed_over():
    rows = [kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.7), kernel("Memset (Device)", 0.2, "gpu_memset")]
    assert heaviest_kernel(seen(*rows)) is None
    assert heaviest_kernel(seen(*rows, kernel("add", 0.1))).name == "add"


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<float, 2>(int)",
        "void twoShotAllReduceKernel<half, 8>(Params)",
        "nvshmemi_transfer",
    ],
)
def test_kernels_that_wait_for_other_devices_are_refused(name):
    with pytest.raises(InputError, match="waits for other devices"):
        refuse_communication(name)


def test_the_launch_is_found_among_instantiations_of_one_function(scene_with_kernels):
    first, second = "void k<int>(int)", "void k<float>(float)"
    trace = scene_with_kernels([first, "void other(int)", second, second, first])
    assert [launch_index(trace, name) for name in (first, second, "k", "void k<half>(half)")] == [0, 1, 0, None]
    assert launch_index(trace.with_name("none.json"), first) is None


@pytest.fixture
def scene_with_kernels(tmp_path):
    """A trace of two profiled calls that launch these kernels, and of another launch before them."""
    import json

    from perfladder.trace.labels import RUN_KIND, encode_label

    def make(names):
        events = []

        def add(cat, name, start, duration, tid=1, **args):
            event = {"ph": "X", "cat": cat, "name": name, "pid": 0 if cat == "kernel" else 100, "tid": tid}
            events.append(event | {"ts": start + 0.001, "dur": duration, "args": args})

        def launch(name, start, number):
            add("cuda_runtime", "cudaLaunchKernel", start, 1, correlation=number)
            add("kernel", name, start + 2, 1, tid=7, correlation=number, device=0, stream=7)

        launch("void k<half>(half)", 1, 99)
        for run in range(2):
            begin = 100 * (run + 1)
            add("user_annotation", encode_label(RUN_KIND, str(run)), begin, 90)
            for index, name in enumerate(names):
                launch(name, begin + 5 * (index + 1), 10 * (run + 1) + index)
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    return make
