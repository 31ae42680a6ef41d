"""Record the reports in tests/data/ncu on a machine with an NVIDIA GPU, `ncu`, torch and perfladder's sources.

    python tests/benchmarks/record_ncu.py [--to FOLDER]

Nothing reads the reports here, so that NVIDIA's package is not needed. Exit code 1 where one could not be recorded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from perfladder.nsight.command import KernelFilter, ncu_command
from perfladder.nsight.output import read_output, tail
from perfladder.nsight.process import run_guarded
from perfladder.nsight.tool import find_ncu

RANGE = "replay_stage"
LIMIT_S = 240.0
PROGRAM = """
import sys, torch, triton
from triton import language as tl

@triton.jit
def add_one(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < size) + 1.0, mask=place < size)

def gemm():
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: left @ right

def add():
    # Not torch's own: a report holds the code of all kernels that were compiled together with the one it is of.
    values = torch.randn(1 << 28, device="cuda")
    sums = torch.empty_like(values)
    return lambda: add_one[(values.numel() // 4096,)](values, sums, values.numel(), BLOCK=4096)

call = {"gemm": gemm, "add": add}[sys.argv[1]]()
for _ in range(3):
    call()
torch.cuda.synchronize()
torch.cuda.nvtx.range_push(sys.argv[2])
call()
torch.cuda.synchronize()
torch.cuda.nvtx.range_pop()
"""
# cuBLAS chooses the product's kernel: its name is not known before, and a range with one launch needs none.
RECORDINGS = {"compute_gemm": ("gemm", "regex:.*"), "memory_add": ("add", "add_one")}


def record(name: str, folder: Path) -> str | None:
    """Record one report; returns why it is not there, or None."""
    tool = find_ncu()
    if tool is None:
        return "ncu is not installed"
    kind, function = RECORDINGS[name]
    report = folder / f"{name}.ncu-rep"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        program, log, printed = (Path(scratch) / part for part in ("program.py", "ncu.log", "printed.log"))
        program.write_text(PROGRAM)
        chosen = KernelFilter(function=function, nvtx_range=RANGE)
        command = ncu_command(tool.path, chosen, report, log, [sys.executable, str(program), kind, RANGE])
        code = run_guarded(command, limit_s=LIMIT_S, log_path=printed)
        told = read_output(log, printed, has_report=report.is_file())
        if code == 0 and report.is_file() and told.obstacle is None:
            print(f"{report}: {report.stat().st_size} bytes, ncu {tool.version}")
            return None
        return f"ncu ended with {code}, {told.obstacle}: {tail(log)}; printed: {tail(printed)}"


def main() -> int:
    """Record all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path(__file__).parents[1] / "data" / "ncu")
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    failures = {name: reason for name in RECORDINGS if (reason := record(name, folder.resolve()))}
    for name, reason in failures.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
