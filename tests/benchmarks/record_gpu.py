"""The tables of docs/benchmarks.md that need a GPU: one name a table, each with the commands that make it.

    python tests/benchmarks/record_gpu.py FOLDER                       # all of them
    python tests/benchmarks/record_gpu.py FOLDER --only tuned ladders
    python tests/benchmarks/record_gpu.py FOLDER --rehearse            # the same on a CPU, with the tiny workloads

FOLDER gets a text file a table with each command, how long it took and all that it printed, and the small files of the
runs: the report as text and as JSON, and the workload, without paths of this machine. Runs themselves lie in a
temporary folder; `--work` names one that stays.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
SD15 = "diffusion-sd15 --set inputs.num_inference_steps=5"
STAGES = "--stage unet --stage text_encoder --stage vae.decode"
REPLAY = f"python bench_capture.py replay --launches 2 {STAGES} --workload {SD15}"
"""Of one picture, where the host sets the pace, and of 16, where the device does."""
LADDERS = {
    "diffusion-sd15": SD15,
    "sdxl-unet": "sdxl-unet",
    "flux-transformer": "flux-transformer",
    "llama-1b": "llama-1b",
    "streaming": "streaming --set device=cuda",
}
TABLES = {
    "tuned": [
        f"perfladder tune {SD15} --quality psnr>=40 --save sd15.ait --json",
        f"perfladder run {SD15} --set tuned.archive=sd15.ait --set tuned.trust=true --plain --out runs/tuned --json",
    ],
    "ladders": [f"perfladder run {words} --plain --out runs/ladders --json" for words in LADDERS.values()],
    "overhead": ["python bench_overhead.py --size sd15 --device cuda --pairs 400 --steps 4"],
    "analysis": [f"python bench_trace.py --workload {SD15} --repeats 2"],
    "replay": [f"{REPLAY} --set inputs.num_images_per_prompt=16", REPLAY],
    "waits": [f"perfladder run {SD15} --set compile.mode=reduce-overhead --until regions --plain --json"],
    "dispatch": ["python bench_dispatch.py", "python bench_dispatch.py --inductor"],
}
SMALL = {"report.md": "report.txt", "report.json": "report.json", "workload.yaml": "workload.yaml"}
TINY = {
    "diffusion-sd15": "diffusion",
    "sdxl-unet": "sdxl-unet --set target_args.size=tiny --set device=cpu --set dtype=null --set inputs.height=64 "
    "--set inputs.width=64",
    "flux-transformer": "flux-transformer --set target_args.size=tiny --set device=cpu --set dtype=null "
    "--set inputs.height=64 --set inputs.width=64 --set inputs.num_tokens=8",
    "llama-1b": "llama-1b --set target_args.size=tiny --set device=cpu --set dtype=null --set inputs.max_new_tokens=4",
    "--set device=cuda": "",
    "--size sd15 --device cuda": "",
    "--pairs 400": "--pairs 10",
    "--set compile.mode=reduce-overhead": "",
    "num_images_per_prompt=16": "num_images_per_prompt=2",
    "--launches 2": "--launches 1",
    "psnr>=40": "psnr>=40 --backend eager:memory_format=channels_last --keep right",
}


def main() -> None:
    """Make the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument(
        "--ladder", nargs="*", default=list(LADDERS), choices=list(LADDERS), help="which of the ladders"
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for runs and archives; default: a temporary one")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            chosen = TABLES[name]
            if name == "ladders":
                chosen = [command for command in chosen if any(f" {one} " in f"{command} " for one in options.ladder)]
            record(name, [_tiny(command) if options.rehearse else command for command in chosen], options.folder, work)


def record(name: str, commands: list[str], folder: Path, work: Path) -> None:
    """Run the commands of a table, and keep what they print and what their runs come to."""
    with (folder / f"{name}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {_machine()}\n")
        for command in commands:
            print(f"$ {command}", flush=True)
            start = time.perf_counter()
            code, printed, errors = _run(command, work)
            took = f"({time.perf_counter() - start:.1f} s, exit code {code})"
            print(took, printed[-1500:] if code == 0 else printed[-3000:] + errors[-3000:], flush=True)
            file.write(f"\n$ {command}\n{printed}{'' if code == 0 else errors}{took}\n")
            file.flush()
            _keep_run(printed, folder / name, work)


def _run(command: str, work: Path) -> tuple[int, str, str]:
    argv = shlex.split(command)
    if argv[0] == "perfladder":
        argv = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "perfladder.cli", *argv[1:]]
    else:
        argv = [sys.executable, str(BENCHMARKS / argv[1]), *argv[2:]]
    done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
    return done.returncode, _without_paths(done.stdout, work), _without_paths(done.stderr, work)


def _keep_run(printed: str, folder: Path, work: Path) -> None:
    """Copy the small files of a run that a command's last words tell of."""
    try:
        answer: Any = json.loads(printed)
    except ValueError:
        return
    found = answer.get("run_dir") if isinstance(answer, dict) else None
    if found is None:
        return
    run = work / found
    target = folder / run.parent.name
    target.mkdir(parents=True, exist_ok=True)
    for name, kept in SMALL.items():
        if (run / name).is_file():
            text = (run / name).read_text(encoding="utf-8")
            (target / kept).write_text(_without_paths(text, work), encoding="utf-8")


def _without_paths(text: str, work: Path) -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    paths = {f"{work}/": "", str(BENCHMARKS.parents[1]): "perfladder", cache: "~/.cache"}
    for path, instead in paths.items():
        text = text.replace(path, instead)
    return text


def _tiny(command: str) -> str:
    for words, instead in TINY.items():
        command = command.replace(words, instead, 1)
    return command


def _machine() -> str:
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs"


if __name__ == "__main__":
    main()
