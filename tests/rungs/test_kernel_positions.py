"""Rung 4 in this process on a network of repeated blocks: rows by position add up to those of single modules."""

import pytest
import torch
from backgrounds import make_background
from torch import nn

from perfladder.findings.kernels import kernels_findings
from perfladder.functional.kinds import kinds_of_numbered
from perfladder.peaks import Peaks
from perfladder.profiling.positions import _block_of_position
from perfladder.report import build_report, render_markdown
from perfladder.report.amounts import as_code
from perfladder.report.tables import show_table
from perfladder.rundir import RunDirectory
from perfladder.rungs import capture, kernels
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.kernels import KernelsRequest
from perfladder.target import LoadedTarget
from perfladder.trace.repeats import leads
from perfladder.workload import parse_workload

TOY = Peaks(device="toy", source="measured", compute_tflops={"float32": 10.0}, bandwidth_gb_per_s=1e4)
WIDTH, ROWS, NUM_BLOCKS = 128, 32, 6


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.shrink(torch.relu(self.grow(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pipe:
    def __init__(self):
        self.stage, self.device = Tower(), "cpu"

    def __call__(self):
        return self.stage(torch.ones(ROWS, WIDTH))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find_peaks", lambda device, folder: TOY)
        options = {"stage": "stage", "folder": str(folder / "capture")}
        capture.measure(load(), CaptureRequest(**options, reference_runs=1))
        request = {"trace_path": str(folder / "kernels.trace.json"), "unprofiled_ms": 2.0, "stage_share": 0.5}
        return kernels.measure(load(), KernelsRequest(folder=options["folder"], **request))


def load():
    return LoadedTarget.of(Pipe(), parse_workload({"name": "n", "target": "m:f", "device": "cpu"}))


def test_single_rows_stay_and_rows_by_position_add_up_to_them(result):
    assert {f"stage.blocks.{index}.grow" for index in range(NUM_BLOCKS)} <= {row.name for row in result.by_module}
    assert all(row.num_modules is None for row in (*result.kernels, *result.ranking, *result.roofline))
    by_position = result.by_position
    for rows, single in (
        (by_position.kernels, result.kernels),
        (by_position.by_module, result.by_module),
        (by_position.by_block, result.by_block),
        (by_position.ranking, result.ranking),
        (by_position.roofline, result.roofline),
    ):
        assert len(rows) < len(single)
        assert sum(row.total_us for row in rows) == pytest.approx(sum(row.total_us for row in single))
        assert sum(row.count for row in rows) == sum(row.count for row in single)
        assert all(row.num_modules >= 1 for row in rows)
    for rows, single in ((by_position.kernels, result.kernels), (by_position.ranking, result.ranking)):
        wins = (sum(row.possible_win_us for row in one) for one in (rows, single))
        assert next(wins) == pytest.approx(next(wins))
    assert [sum(values) for values in zip(*(row.repeat_us for row in by_position.kernels), strict=True)] == (
        pytest.approx(result.repeat_us)
    )


def test_blocks_are_one_row_and_layers_of_the_head_two(result):
    shares = {row.name: row for row in result.by_position.by_module}
    assert shares["stage.blocks.*.grow"].num_modules == NUM_BLOCKS
    assert {"stage.head.0", "stage.head.2"} <= shares.keys()
    (block,) = (row for row in result.by_position.by_block if "*" in row.name)
    assert (block.name, block.num_modules) == ("stage.blocks.*", NUM_BLOCKS)
    inside = [row for row in result.by_block if row.name.startswith("stage.blocks.")]
    assert block.total_us == pytest.approx(sum(row.total_us for row in inside))
    assert leads(block, result.by_position.by_block)


def test_blocks_of_a_stage_that_is_a_list_are_what_is_inside_of_them():
    assert _block_of_position("net.model.layers.*.mlp.up", "net") == "net.model.layers.*"
    assert _block_of_position("net.*.mix.0", "net") == "net.*.mix"
    assert _block_of_position("net.up_blocks.0.attentions.*.norm", "net") == "net.up_blocks.0"
    assert _block_of_position("net.blocks.[0-3]", "net") == "net.blocks.[0-3]"
    assert _block_of_position("net.blocks.*.[0,2]", "net") == "net.blocks.*"
    assert (_block_of_position("net", "net"), _block_of_position("other.a.b.c", "net")) == ("net", "other.a.b.c")


def test_rates_are_of_all_work_in_all_time(result):
    (row,) = (row for row in result.by_position.roofline if row.region_id == "untuned_module:stage.blocks.*.grow")
    assert row.operator == "aten::addmm"
    assert row.flops == NUM_BLOCKS * 2 * ROWS * WIDTH * 4 * WIDTH
    assert row.compute_tflops == pytest.approx(row.flops / row.total_us / 1e6)
    assert row.compute_frac == pytest.approx(row.compute_tflops / 10)
    (group,) = (
        group
        for group in result.by_position.ranking
        if (group.region_id, group.operator) == (row.region_id, row.operator)
    )
    assert group.achieved_frac == pytest.approx(row.achieved_frac, rel=1e-6)
    assert group.possible_win_frac == pytest.approx(group.possible_win_us / 2000)
    assert group.run_win_frac == pytest.approx(group.possible_win_frac / 2)


def test_findings_name_the_repeated_blocks(result):
    found = {finding.kind: finding for finding in kernels_findings(result, make_background())}
    assert f"the heaviest blocks are stage.blocks.* ({NUM_BLOCKS}) with " in found["dominant_kernels"].claim
    assert "in stage.blocks.*, check" in found["dominant_kernels"].next_experiment
    old = result.model_copy(update={"by_position": None})
    older = {finding.kind: finding for finding in kernels_findings(old, make_background())}
    assert "the heaviest blocks are" not in older["dominant_kernels"].claim
    shown = [one["largest_possible_win"].claim for one in (found, older) if "largest_possible_win" in one]
    assert [f"({NUM_BLOCKS})" in claim for claim in shown] == [True, False][: len(shown)]


def test_report_and_tables_show_positions_with_the_number_of_modules(result, tmp_path):
    workload = parse_workload({"name": "n", "target": "m:f"})
    run = RunDirectory.create(tmp_path / "runs", workload, source="n", base_dir=tmp_path)
    run.write_result(run.rung_folder(4, "kernels"), "kernels", result, "done", None)
    text = render_markdown(build_report(run.path))
    assert text.count(f"| `stage.blocks.*.grow` ×{NUM_BLOCKS} |") >= 3
    assert f"| `stage.blocks.*` ×{NUM_BLOCKS} |" in text
    assert "stage.blocks.3" not in text
    (row,) = show_table(run.path, "blocks", contains="blocks.*").rows
    assert row["num_modules"] == NUM_BLOCKS
    for name in ("kernels", "roofline", "places"):
        assert show_table(run.path, name, contains="stage.blocks.*.grow").rows


def test_paths_of_repeated_modules_are_code_in_markdown():
    text = "the heaviest blocks are a.b.* (2). In a.*.proj.2, and `a.*.b` in n.[1-2].*.mlp. 2 * 3 stays."
    assert as_code(text) == (
        "the heaviest blocks are `a.b.*` (2). In `a.*.proj.2`, and `a.*.b` in `n.[1-2].*.mlp`. 2 * 3 stays."
    )
    assert as_code("in n.m.[0,2,4,..,22] (12), not in a.b [2, 3].") == "in `n.m.[0,2,4,..,22]` (12), not in a.b [2, 3]."
    assert as_code("`n.[0-1]`, n.[0-1].") == "`n.[0-1]`, `n.[0-1]`."


def test_kinds_tell_classes_and_shapes_inside_and_no_values():
    tower = Tower()
    modules = dict(tower.named_modules())
    kinds = kinds_of_numbered({**modules, "lazy.0": nn.LazyLinear(3), "lazy.1": nn.LazyLinear(3)})
    assert {kinds[f"blocks.{index}"] for index in range(NUM_BLOCKS)} == {kinds["blocks.0"]}
    assert len({kinds[f"head.{index}"] for index in range(3)}) == 3
    assert kinds["lazy.0"] == kinds["lazy.1"]
    assert "head" not in kinds
    assert kinds_of_numbered({"a.0": nn.Sequential(nn.GELU())}) != kinds_of_numbered({"a.0": nn.Sequential(nn.ReLU())})
