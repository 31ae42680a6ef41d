"""What the page of a run with a large trace costs: its size, the time to make it, and the browser's first paint.

    python tests/benchmarks/bench_report.py [--events 1000000] [--folder FOLDER] [--run RUN]

Climbs the ladder on a chain of small blocks, called so often that the profiled window has about that many events, or
takes a run that is there. Prints JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOALS = {"size_mb": 5.0, "make_s": 5.0, "first_paint_ms": 2000.0}
EVENTS_PER_STEP = 294
"""Of the profiled window: one step through all blocks, hooks included, on a CPU."""
TARGET = """
import torch
from torch import nn


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()) for _ in range(10)
        )

    def forward(self, x, steps):
        for _ in range(steps):
            for block in self.blocks:
                x = block(x)
        return x


class Chain:
    def __init__(self):
        torch.manual_seed(0)
        self.net, self.head = Blocks(), nn.Conv2d(4, 8, 1)

    def __call__(self, steps=1):
        x = torch.ones(1, 4, 8, 8)
        with torch.no_grad():
            for _ in range(10):
                x = self.net(x, steps)
            return self.head(x)


def build():
    return Chain()
"""
MAKE = """
import json, sys, time
begin = time.perf_counter()
from pathlib import Path
from perfladder.report import build_report, render_html
run = Path(sys.argv[1])
imported = time.perf_counter()
page = render_html(build_report(run), run)
made_s = time.perf_counter() - imported
Path(sys.argv[2]).write_text(page, encoding="utf-8")
print(json.dumps({"import_s": imported - begin, "make_s": made_s, "size_mb": len(page.encode()) / 1e6}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="Where the run is made; by default a temporary folder.")
    parser.add_argument("--run", type=Path, help="A run that is there.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        run = options.run or climb_chain(folder, options.events)
        page = Path(temporary) / "report.html"
        made = [make(run, page) for _ in range(options.repeats)]
        paints = [paint(page) for _ in range(options.repeats)]
    regions = json.loads(next(run.glob("*-regions/regions.json")).read_text())
    result = {
        "run": str(run),
        "num_events": regions["num_events"],
        "make_s": [round(each["make_s"], 2) for each in made],
        "import_s": [round(each["import_s"], 2) for each in made],
        "size_mb": round(made[0]["size_mb"], 2),
        "first_paint_ms": [round(each["first_paint_ms"]) for each in paints],
        "all_plots_ms": [round(each["all_plots_ms"]) for each in paints],
        "num_plots": paints[0]["num_plots"],
        "load_1min": os.getloadavg()[0],
        "goals": GOALS,
    }
    for name in ("make_s", "first_paint_ms", "all_plots_ms"):
        result[f"{name}_median"] = statistics.median(result[name])
    print(json.dumps(result, indent=1))


def climb_chain(folder, num_events):
    """Profile the chain; three profiled runs share the events."""
    from perfladder.ladder import climb

    (folder / "chain.py").write_text(TARGET)
    steps = max(1, num_events // 3 // EVENTS_PER_STEP // 10)
    (folder / "chain.yaml").write_text(
        f"name: chain\ntarget: chain.py:build\ninputs: {{steps: {steps}}}\ndevice: cpu\nwarmup_runs: 1\n"
    )
    outcome = climb(folder / "chain.yaml", runs_dir=folder / "runs", tell=lambda line: print(line, file=sys.stderr))
    return Path(outcome.run_dir)


def make(run, page):
    """In a process of its own, as a command makes it."""
    command = [sys.executable, "-c", MAKE, str(run), str(page)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def paint(page):
    """Open the page in a fresh browser."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Browser

    with Browser() as browser:
        browser.open(page)
        assert not browser.errors, browser.errors
        return {
            "first_paint_ms": browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"),
            "all_plots_ms": browser.evaluate("Number(document.documentElement.dataset.plotsMs)"),
            "num_plots": browser.evaluate("document.querySelectorAll('.plot .main-svg:first-child').length"),
        }


if __name__ == "__main__":
    main()
