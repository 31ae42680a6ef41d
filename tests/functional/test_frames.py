"""The table of kernels, from a recorded run on a CUDA device."""

from pathlib import Path

import pytest
from torch import nn

from perfladder.functional.frames import Rows, summarize_functions
from perfladder.functional.sites import ModuleSites
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace

DATA = Path(__file__).parents[1] / "data" / "cuda"


def sites_named(*names, opaque=()):
    """Sites of modules that were once at these paths."""
    labels = {name: ("untuned_module", name) for name in names}
    return ModuleSites([], labels, {name: nn.Identity() for name in names}, set(opaque))


def rows_of(name, sites):
    return Rows(list_kernels(Trace.read(DATA / f"{name}.json.gz")), sites)


def test_kernels_of_a_device_run_have_module_operator_and_duration():
    sites = sites_named("net", "net.conv", "net.attention", "net.out")
    rows = rows_of("eager", sites)
    frame = rows.frame()
    # Three runs of a network that launches 12 kernels and fills.
    assert len(frame) == rows.num_rows == 36
    assert rows.total_us == pytest.approx(frame["kernel_us"].sum())
    assert rows.outside_us > 0
    assert (rows.attributed_us, set(frame["function_name"])) == (0, {"(none)"})
    assert set(frame.loc[frame["module_name"] == "net.conv", "op"]) == {"aten::conv2d", "aten::silu"}
    assert set(frame.loc[frame["kernel"].str.startswith("fmha"), "op"]) == {"aten::scaled_dot_product_attention"}
    assert set(frame["module"]) == {sites.modules[name] for name in ("net.conv", "net.attention", "net.out")}


def test_only_modules_of_the_hierarchy_have_rows():
    frame = rows_of("eager", sites_named("net.conv")).frame()
    assert set(frame["module_name"]) == {"net.conv"}


def test_compiled_device_run_is_attributed_to_the_region():
    rows = rows_of("compiled", sites_named("net", opaque={"net"}))
    frame = rows.frame()
    assert rows.attributed_us == pytest.approx(rows.total_us)
    assert frame["function_name"].str.startswith("compiled region net: ").all()
    assert "compiled region net: fused convolution" in set(frame["function_name"])
    assert "aten::addmm" in set(frame["op"])


def test_summary_of_no_rows_has_its_columns():
    frame = rows_of("eager", sites_named("elsewhere")).frame()
    assert summarize_functions(frame, {}, 10).empty
