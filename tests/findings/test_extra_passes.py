"""Layouts and unfused operators, on what two pipelines showed on an H200, and on the same with something changed."""

import json
from pathlib import Path

import pytest
from backgrounds import make_background

from perfladder.findings import smallest_next_experiment
from perfladder.findings.background import spread_text
from perfladder.findings.kernels import kernels_findings
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.kernels import KernelSummary

RECORDED = Path(__file__).parents[1] / "data" / "kernels"


def recorded(name, **changes):
    data = json.loads((RECORDED / f"{name}.json").read_text()) | changes
    return KernelsResult.model_validate(data)


def in_pace(result, verdict):
    return result.model_copy(update={"bound": result.bound.model_copy(update={"verdict": verdict})})


def row(kernel="k", **fields):
    """A row by call."""
    base = {"category": "kernel", "operator": None, "outer_operator": None, "function": None, "region": None}
    base |= {"count": 1, "total_us": 900.0, "mean_us": 900.0, "share": 0.1, "example_event": 0}
    return KernelSummary(kernel=kernel, **(base | fields))


def found(result, kind, **workload):
    """The finding of that kind, or None."""
    background = make_background("cuda:0", modules=["unet", "transformer"], **workload)
    own = [one for one in kernels_findings(result, background) if one.kind == kind]
    assert len(own) <= 1
    return own[0] if own else None


def evidence_of(finding):
    return {one.metric: one.value for one in finding.evidence}


def test_a_spread_holds_the_share_itself():
    """A row of several parts has the sum of their medians, which may be less than each of its sums."""
    parts = row(total_us=440.0, repeat_us=[460.0, 450.0, 455.0])
    assert spread_text(parts, 1000.0) == "44% to 45% by its times in 3 profiled replays"
    assert spread_text(row(), 1000.0) == ""


def test_convolutions_that_change_the_layout_lead_to_channels_last():
    finding = found(recorded("convolutions"), "layout_conversions")
    assert "In unet, 101 kernels a call" in finding.claim
    assert "26% of the kernel time" in finding.claim
    assert evidence_of(finding) == {
        "layout share": pytest.approx(0.2635, abs=1e-4),
        "layout count": 101,
        "plain_busy_frac": pytest.approx(0.4695, abs=1e-4),
    }
    assert finding.uncertainty.startswith("26% to 26% by its times in 3 profiled replays")
    assert finding.next_command == "perfladder tune n.yaml --module unet --backend eager:memory_format=channels_last"
    assert "101 launches fewer" in finding.next_experiment  # the host sets the pace
    assert "launches" not in found(in_pace(recorded("convolutions"), "device"), "layout_conversions").next_experiment


def test_operators_that_no_compiler_wrote_lead_to_one():
    finding = found(recorded("operators"), "fusable_operators")
    # Sums of the 12 rows of the file that are neither products nor attention.
    assert "In transformer, 1761 kernels a call" in finding.claim
    assert "hold 36% of the kernel time" in finding.claim
    values = evidence_of(finding)
    parts = [values[f"{family} share"] for family in ("elementwise", "copy", "normalization")]
    assert values["unfused share"] == pytest.approx(sum(parts))
    assert "reduction share" not in values
    assert finding.next_command == "perfladder tune n.yaml --module transformer --backend inductor_jit"
    mixed = found(in_pace(recorded("operators"), "mixed"), "fusable_operators")
    assert mixed.next_command.endswith("--backend inductor_jit:cuda_graphs=true")


def test_both_come_before_the_look_at_one_kernel():
    for name, kind in (("convolutions", "layout_conversions"), ("operators", "fusable_operators")):
        result = in_pace(recorded(name), "device")
        result = result.model_copy(update={"kernels": [row(result.by_kernel[0].name)]})
        findings = kernels_findings(result, make_background("cuda:0"))
        assert {"device_bound", kind, "kernel_question"} <= {finding.kind for finding in findings}
        assert smallest_next_experiment(findings).kind == kind


def test_where_the_host_sets_the_pace_launches_count_and_not_passes_over_memory():
    assert found(in_pace(recorded("operators"), "host"), "fusable_operators") is None
    assert found(recorded("operators", bound=None), "fusable_operators") is None


@pytest.mark.parametrize("kind", ["layout_conversions", "fusable_operators"])
def test_operators_of_a_cpu_tell_neither(kind):
    for name in ("convolutions", "operators"):
        assert found(recorded(name, kind="operators"), kind) is None


def scaled(rows, is_chosen, factor):
    return [one | {key: one[key] * factor for key in ("share", "total_us")} if is_chosen(one) else one for one in rows]


@pytest.mark.parametrize(("share", "is_found"), [(0.051, True), (0.049, False)])
def test_layouts_count_from_a_twentieth_of_the_kernel_time(share, is_found):
    families = json.loads((RECORDED / "convolutions.json").read_text())["families"]
    changed = scaled(families, lambda one: one["family"] == "layout", share / 0.26351614)
    assert (found(recorded("convolutions", families=changed), "layout_conversions") is not None) is is_found


@pytest.mark.parametrize(("share", "is_found"), [(0.21, True), (0.19, False)])
def test_unfused_operators_count_from_a_fifth_of_the_kernel_time(share, is_found):
    rows = json.loads((RECORDED / "operators.json").read_text())["by_kernel"]
    changed = scaled(rows, lambda one: "at::native" in one["name"], share / 0.36339)
    assert (found(recorded("operators", by_kernel=changed), "fusable_operators") is not None) is is_found


def compiled_rows(first=0):
    """The heaviest rows as they are, and from the `first` operator on as a compiler names its kernels."""
    rows = json.loads((RECORDED / "operators.json").read_text())["by_kernel"]
    own = [one for one in rows if "at::native" in one["name"]]
    for number, one in enumerate(own[first:]):
        one["name"] = f"triton_poi_fused_add_mul_{number}"
    return rows


def test_a_compiled_stage_has_neither_finding():
    result = recorded("operators", by_kernel=compiled_rows())
    assert found(result, "fusable_operators") is None
    assert found(result, "layout_conversions") is None


def test_what_a_compiler_left_out_is_no_reason_to_compile_again():
    finding = found(recorded("operators", by_kernel=compiled_rows(first=6)), "fusable_operators")
    assert "graph breaks" in finding.next_experiment
    assert finding.next_command is None


def test_copies_between_memories_and_own_triton_kernels_are_not_fused():
    rows = json.loads((RECORDED / "operators.json").read_text())["by_kernel"]
    rest = [one for one in rows if "at::native" not in one["name"]]
    many = {"total_us": 9e4, "share": 0.5, "count": 9, "repeat_us": [9e4] * 3}
    copied = [*rest, {"name": "Memcpy DtoD (Device -> Device)", **many}]
    assert found(recorded("operators", by_kernel=copied), "fusable_operators") is None
    rotary = recorded("operators", by_kernel=[*rest, {"name": "rotary_kernel", **many}])
    assert found(rotary, "fusable_operators") is not None
    own = row("rotary_kernel", launch_site="net.py:4 (turn)")
    assert found(rotary.model_copy(update={"kernels": [own]}), "fusable_operators") is None


@pytest.mark.parametrize("workload", [{"compile": {}}, {"tuned": {"archive": "net.ait"}}, {"nproc": 2}])
def test_no_command_where_tuning_would_refuse_the_workload(workload):
    for name, kind in (("convolutions", "layout_conversions"), ("operators", "fusable_operators")):
        finding = found(recorded(name), kind, **workload)
        assert finding.next_experiment
        assert finding.next_command is None


def test_a_stage_that_is_a_method_is_tuned_by_the_modules_that_it_calls():
    inside = row(region="untuned_module:vae.decoder.conv_in")
    result = recorded("convolutions", stage="vae.decode").model_copy(update={"kernels": [inside]})
    finding = found(result, "layout_conversions")
    assert finding.next_command == "perfladder tune n.yaml --backend eager:memory_format=channels_last"


@pytest.mark.parametrize(("operator", "words"), [("conv3d", "channels_last_3d"), ("conv_transpose1d", "height 1")])
def test_convolutions_of_other_dimensions_have_no_such_backend(operator, words):
    call = row(family="layout", outer_operator=f"aten::{operator}")
    finding = found(recorded("convolutions").model_copy(update={"kernels": [call]}), "layout_conversions")
    assert words in finding.next_experiment
    assert finding.next_command is None


def test_replays_that_differ_show_in_the_spread():
    families = json.loads((RECORDED / "convolutions.json").read_text())["families"]
    for one in families:
        if one["family"] == "layout":
            one["repeat_us"][2] *= 2
    finding = found(recorded("convolutions", families=families), "layout_conversions")
    assert finding.uncertainty.startswith("26% to 42% by its times")


def test_evidence_points_at_fields_of_the_result():
    for name, kind in (("convolutions", "layout_conversions"), ("operators", "fusable_operators")):
        for evidence in found(recorded(name), kind).evidence:
            file, _, field = evidence.source.partition(": ")
            assert file == "kernels.json"
            assert field in KernelsResult.model_fields
