"""Go through the worked cases of docs/cases as a user would, on whatever device is here, and write what was seen.

    python tests/benchmarks/record_cases.py FOLDER [--only NAME ...]

Each case is a script with one fault, in a repository of its own: profile it, change it, measure both versions in turns.
The pages of docs/cases quote these transcripts, shortened.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = Path(__file__).parents[2] / "docs" / "cases"

STEPS = {
    "item_in_scheduler": [
        "perfladder exec --plain --json --function Sampler.sample item_in_scheduler.py",
        "perfladder show latest stages --json",
        "perfladder show latest findings --contains host_bound --json",
        "perfladder init --set call=sample --set inputs.steps=10 item_in_scheduler.py:Sampler",
        (
            "noise.float().abs().mean().item()",
            "noise.float().abs().mean()",
        ),
        (
            "noise * (0.01 * self.signal_left(time) / (1 + scale))",
            "noise * (0.01 * self.signal_left(time) / (1 + scale)).to(noise.dtype)",
        ),
        "perfladder compare item_in_scheduler.yaml --interleave --baseline-commit HEAD",
    ],
    "wide_decoder": [
        "perfladder exec --plain --json --function Codec.__call__ wide_decoder.py",
        "perfladder show latest stages --json",
        "NEXT_COMMAND",
        "perfladder init --set 'inputs.frames={$tensor: [256, 1024]}' wide_decoder.py:Codec",
        (
            "nn.Linear(width, 768)).to(device).eval()",
            "nn.Linear(width, 768)).to(device, torch.bfloat16).eval()",
        ),
        "perfladder compare wide_decoder.yaml --interleave --baseline-commit HEAD",
    ],
    "tiny_operators": [
        "perfladder exec --plain --json --function Synthesizer.__call__ tiny_operators.py",
        "perfladder show latest stages --json",
        "perfladder show latest findings --contains host_bound --json",
        "perfladder show latest operators --top 4",
        "perfladder init --set 'inputs.notes={$tensor: [200, 64]}' tiny_operators.py:Synthesizer",
        (
            """        bands = []
        for index in range(len(self.gain)):
            bands.append(torch.tanh(signal[index] * self.gain[index] + self.bias[index]))
        return torch.stack(bands)
""",
            """        return torch.tanh(signal[: len(self.gain)] * self.gain[:, None] + self.bias[:, None])
""",
        ),
        "perfladder compare tiny_operators.yaml --interleave --baseline-commit HEAD",
    ],
}
"""A command, or a change of the script as what was there and what comes in its place."""


def shell(command, folder):
    """Run a command line and return what it printed, stdout first."""
    argv = shlex.split(command)
    if argv[0] == "perfladder":
        argv = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "perfladder.cli", *argv[1:]]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    status = "" if done.returncode == 0 else f"(exit code {done.returncode})\n"
    return status + done.stdout + done.stderr


def record(name, folder):
    """Go through one case in a folder; returns the transcript."""
    script = folder / f"{name}.py"
    script.write_text((CASES / script.name).read_text())
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n*.yaml\n")
    identity = "git -c user.name=case -c user.email=case@example.com"
    for command in ("git init -q .", f"{identity} add -A", f"{identity} commit -qm before"):
        shell(command, folder)
    lines, answer = [f"$ python {script.name}\n{shell(f'{sys.executable} {script.name}', folder)}"], ""
    for step in STEPS[name]:
        if isinstance(step, tuple):
            text = script.read_text()
            assert text.count(step[0]) == 1, step
            script.write_text(text.replace(*step))
            continue
        if step.startswith("perfladder compare"):
            lines.append(f"$ git diff\n{shell('git diff', folder)}")
            lines.append(f"$ python {script.name}\n{shell(f'{sys.executable} {script.name}', folder)}")
        if step == "NEXT_COMMAND":
            step = next(iter(re.findall(r'"next_command": "(perfladder tune .*)"', answer)), None)
            if step is None:
                continue
        said = shell(step, folder)
        answer = said if step.startswith("perfladder exec") else answer
        lines.append(f"$ {step}\n{said}")
        print(lines[-1], flush=True)
    return "\n".join(lines).replace(str(folder), "~/case")


def main():
    """Record the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(STEPS), choices=list(STEPS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            (options.folder / f"{name}.txt").write_text(record(name, Path(folder).resolve()))


if __name__ == "__main__":
    main()
