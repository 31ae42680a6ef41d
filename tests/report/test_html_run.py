"""The page of a run, from results that an H200 gave, and from a run made here."""

import json
import re

import pytest
from html_pages import parse
from recorded_runs import NAMES, make_run
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.ladder import climb
from perfladder.nsight import thresholds
from perfladder.nsight.diagnosis import diagnose
from perfladder.report import build_report, render_html, write_report
from perfladder.rundir import RunDirectory
from perfladder.rungs.ncu import NcuResult, ProfiledLaunch

RUNNER = CliRunner()
SECTIONS = [
    *("findings", "stages", "load", "timeline", "regions", "idle", "harness", "kernels", "roofline", "ncu", "memory"),
    *("workload", "warnings", "files"),
]
HOSTILE = "void <script>alert(1)</script>&\"'\u202eキ" + "x" * 2000


def page_of(run) -> str:
    return render_html(build_report(run), run)


def section(text: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', text, flags=re.DOTALL)
    return found[0] if found else ""


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A run with device data, and its page."""
    run = make_run(tmp_path_factory.mktemp("runs"))
    return run, page_of(run)


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_run_has_a_whole_page(name, tmp_path):
    run = make_run(tmp_path, name)
    text = page_of(run)
    found = parse(text)
    assert [key for key in found.ids if key in SECTIONS] == SECTIONS
    assert len(found.ids) == len(set(found.ids)), "an id is one element's"
    targets = {link["href"][1:] for link in found.all("a") if link["href"].startswith("#")}
    assert targets <= set(found.ids)
    report = build_report(run)
    assert all(finding.claim in found.text for finding in report.findings)
    assert f"{report.metric.value:#.4g}".rstrip(".") in found.text
    assert len(text.encode()) < 5e6


def test_same_run_gives_the_same_page(ahead):
    run, text = ahead
    assert page_of(run) == text


def test_nothing_on_the_page_leads_to_another_machine(ahead):
    found = parse(ahead[1])
    leads = [
        value for _, own in found.elements for key, value in own.items() if key in ("src", "href", "srcset", "action")
    ]
    assert leads
    assert not [lead for lead in leads if re.match(r"(?i)\s*([a-z]+:)?//|\s*(https?|ftp|javascript):", lead)]
    assert not [own for name, own in found.elements if name in ("iframe", "object", "embed", "img", "base", "form")]
    styles_and_scripts = "".join(found.scripts)
    packed = max(found.scripts, key=len)
    assert "@import" not in styles_and_scripts
    assert "http" not in styles_and_scripts.replace(packed, "")


def test_headline_says_the_metric_the_claim_and_what_to_do_next(ahead):
    report = build_report(ahead[0])
    headline = ahead[1].partition('<section id="findings"')[0]
    text = parse(f"{headline}</main></div></body></html>").text
    assert "18.60 to 19.11" in text
    assert report.next_experiment in text
    assert (
        next(finding for finding in report.findings if finding.next_experiment == report.next_experiment).claim in text
    )


def test_evidence_leads_to_the_section_and_to_the_file_with_its_number(ahead):
    run, text = ahead
    links = [link["href"] for link in parse(section(text, "findings")).all("a")]
    assert {"#stages", "#idle", "#harness", "#kernels"} <= set(links)
    files = {link for link in links if not link.startswith("#")}
    assert files == {
        f"{place}.json" for place in ("1-stages/stages", "2-regions/regions", "3-harness/harness", "4-kernels/kernels")
    }
    assert all((run / file).is_file() for file in files)


def test_tables_and_marks_of_the_page_can_be_reached_without_a_mouse(ahead):
    found = parse(ahead[1])
    assert found.all("a")[0] == {"class": "skip", "href": "#main"}
    assert [len(found.all(tag)) for tag in ("main", "nav", "header", "footer", "h1")] == [1, 1, 1, 1, 1]
    assert len(found.all("table")) == len(found.all("caption"))
    assert all(
        own["tabindex"] == "0" and own["aria-labelledby"] in found.ids
        for own in found.all("div")
        if own.get("class") == "scroll"
    )
    assert all(head["scope"] in ("col", "row") for head in found.all("th"))


def test_names_of_the_program_are_only_text(tmp_path):
    def rename_kernels(data):
        data["kernels"][0]["kernel"] = HOSTILE
        data["by_kernel"][0]["name"] = HOSTILE

    def rename_stage(data):
        data["scenarios"][0]["stages"][0]["name"] = HOSTILE

    run = make_run(tmp_path, changes={"kernels": rename_kernels, "stages": rename_stage})
    text = page_of(run)
    found = parse(text)
    assert "<script>alert" not in text
    assert HOSTILE in found.text
    assert not [script for script in found.scripts if "alert(1)" in script]


@pytest.mark.parametrize(
    ("rungs", "named"),
    [
        (("stages",), {"regions": "not climbed", "harness": "not climbed", "ncu": "--until ncu"}),
        ((), {"stages": "not climbed", "memory": "not climbed", "findings": "no rung was finished"}),
    ],
)
def test_section_of_a_rung_that_did_not_run_says_why(rungs, named, tmp_path):
    text = page_of(make_run(tmp_path, rungs=rungs))
    for name, reason in named.items():
        assert reason in parse(section(text, name)).text, name


def test_failed_and_skipped_rungs_give_their_own_reason(tmp_path):
    def fail(data):
        data |= {"status": "failed", "reason": "The profiler was <taken>."}

    def skip(data):
        data |= {"status": "skipped", "reason": "No stage is worth it."}

    text = page_of(make_run(tmp_path, changes={"regions": fail, "kernels": skip}))
    assert "It failed: The profiler was <taken>." in parse(section(text, "regions")).text
    assert "It was skipped: No stage is worth it." in parse(section(text, "roofline")).text
    assert "Failed: regions." in parse(text).text


def test_samples_without_a_device_make_no_device_columns(tmp_path):
    def without_device(data):
        for stage in data["scenarios"][0]["stages"]:
            stage |= {"device_self_ms": None, "device_total_ms": None, "memory": None}

    text = page_of(make_run(tmp_path, changes={"stages": without_device}))
    assert "device self p50" not in section(text, "stages")
    assert "were not measured in this run" in section(text, "memory")


def test_links_lead_to_the_run_from_wherever_the_page_lies(ahead, tmp_path):
    run, _ = ahead
    page = tmp_path / "elsewhere" / "page.html"
    done = RUNNER.invoke(app, ["report", str(run), "--html", str(page)])
    assert (done.exit_code, done.stdout) == (0, f"Report: {page}\n")
    links = [link["href"] for link in parse(page.read_text()).all("a")]
    assert [link for link in links if link.endswith("stages.json") and (page.parent / link).is_file()]


def test_open_shows_the_page_where_there_is_a_display_and_else_tells_where_it_is(ahead, monkeypatch, tmp_path):
    run, text = ahead
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    done = RUNNER.invoke(app, ["report", str(run), "--open"])
    assert (done.exit_code, done.stdout, opened) == (0, f"Report: {run}/report.html\n", [])
    assert (run / "report.html").read_text() == text
    monkeypatch.setenv("DISPLAY", ":0")
    done = RUNNER.invoke(app, ["report", str(run), "--open", "--json", "--html", str(tmp_path / "a.html")])
    assert opened == [(tmp_path / "a.html").as_uri()]
    assert json.loads(done.stdout)["run"]["run_id"] == "20261130T080000-0a1b2c"


def test_page_that_cannot_be_written_is_told(ahead, tmp_path):
    done = RUNNER.invoke(app, ["report", str(ahead[0]), "--html", "/proc/page.html"])
    assert done.exit_code == 4
    assert "Name a file elsewhere with --html" in done.stderr
    assert RUNNER.invoke(app, ["report", str(ahead[0]), "--html", str(tmp_path)]).exit_code == 2


@pytest.mark.slow
def test_a_run_leaves_its_page_with_its_course_over_time(write_target, tmp_path):
    source = """
        import torch
        from torch import nn

        class Pipe:
            def __init__(self):
                self.net = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
                self.head = nn.Linear(64, 4)

            def __call__(self):
                with torch.no_grad():
                    x = torch.ones(256, 64)
                    for _ in range(4):
                        x = self.net(x)
                    return self.head(x)

        def build():
            return Pipe()
    """
    outcome = climb(write_target(tmp_path, source, measured_runs=3), runs_dir=tmp_path / "runs", until="regions")
    report = build_report(tmp_path / "runs" / "test" / outcome.run_dir.rpartition("/")[2])
    text = (tmp_path / outcome.run_dir / "report.html").read_text()
    timeline, regions = section(text, "timeline"), section(text, "regions")
    assert "Profiled run" in timeline
    assert {"net", "head"} <= set(parse(timeline).cells("code"))
    assert "Regions inside regions" in regions
    assert report.run.status == "done"


def test_report_is_written_in_all_its_forms(tmp_path):
    run = make_run(tmp_path, rungs=("stages",))
    write_report(build_report(run), run)
    assert {path.name for path in run.glob("report.*")} == {"report.json", "report.md", "report.html"}


def test_kernel_under_nsight_compute_has_its_verdict_metrics_and_stalls(tmp_path):
    run = RunDirectory.open(make_run(tmp_path))
    stall = f"{thresholds.STALL_PREFIX}{{}}{thresholds.STALL_SUFFIX}"
    metrics = {thresholds.COMPUTE: 25.0, thresholds.MEMORY: 30.0, thresholds.WAVES: 5.0, thresholds.ISSUE: 0.2}
    waits = {stall.format("long_scoreboard"): 12.0, stall.format("wait"): 3.0, stall.format("selected"): 1.0}
    diagnosis = diagnose(metrics | waits | {thresholds.WARP_LATENCY: 20.0})
    launch = ProfiledLaunch(index=0, name="gemm", demangled_name=HOSTILE, is_asked_kernel=None, diagnosis=diagnosis)
    result = NcuResult(
        stage="unet", kernel="gemm", launches=[launch], verdict=diagnosis.verdict, statement=diagnosis.statement
    )
    run.write_result(run.rung_folder(5, "ncu"), "ncu", result, "done", None)
    found = parse(section(page_of(run.path), "ncu"))
    assert diagnosis.statement in found.text
    assert "perhaps another instantiation: latency" in found.text
    assert HOSTILE in found.text
    assert "long_scoreboard" in found.cells("code")
    assert "What warps of launch 0 wait for" in found.cells("h3")
    assert {row.metric for row in diagnosis.observations} <= set(found.cells("code"))


def test_scenarios_load_streams_and_ranks_are_shown_where_they_were_measured(tmp_path):
    def with_more(data):
        summary = data["throughput"][0]["latency_ms"]
        samples = {"launches": [[5.0, 6.0, 7.0]]}
        large = json.loads(json.dumps(data["scenarios"][0]))
        large["name"] = "large"
        large["cadence"] = None
        data["scenarios"].append(large)
        data["throughput"].append(data["throughput"][0] | {"scenario": "large"})
        data["scenarios"][0]["cadence"] = {
            "media_ms_per_chunk": 500.0,
            "margin_ms": 5.0,
            "chunks_per_run": 4.0,
            "first_chunk_ms": samples,
            "chunk_ms": summary,
            "num_late_chunks": 2,
            "headroom_ms": 400.0,
        }
        data["concurrency"] = [
            {"concurrency": 4, "mode": "threads", "num_requests": 0, "num_errors": 0, "failure": "It <crashed>."}
        ]

    text = page_of(make_run(tmp_path, changes={"stages": with_more}))
    found = parse(section(text, "load"))
    assert "headroom 400.0 ms, 2 late." in found.text
    assert "It <crashed>." in found.cells("td")
    assert {"default", "large"} <= set(found.cells("th"))
    assert "Stage times of 10 runs, scenario large" in parse(section(text, "stages")).cells("caption")
