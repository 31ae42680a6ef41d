"""What a page says about its blocks is read as it is meant, and a block that fails is told with its place."""

import json
import subprocess
import sys
from pathlib import Path

from page_blocks import blocks_of, inline_commands

RUNNER = Path(__file__).parents[1] / "support" / "run_page.py"
PAGE = """# A page

Write `perfladder show latest --top 3`. Then `my_pipe.py`:

```python
WIDTH = 4
```

As in `my_pipe.py`, this is code:

```python
import my_pipe
```

<!-- runs with: --until stages -->
```console
$ perfladder exec script.py --its 'own options'
shown as text
$ echo done
```

<!-- not run: needs a GPU -->
<!-- exits: 4 -->
```sh
# a comment
perfladder run big.yaml  # another one
```
"""


def read(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    return blocks_of(tmp_path / "page.md", tmp_path)


def test_a_block_after_a_name_and_a_colon_is_a_file(tmp_path):
    shown, code, *_ = read(tmp_path)
    assert (shown.file, shown.is_run, shown.where) == ("my_pipe.py", False, "page.md:5")
    assert (code.file, code.is_run) == (None, True)


def test_options_for_a_run_stand_behind_the_verb(tmp_path):
    console = read(tmp_path)[2]
    assert console.commands == ["perfladder exec script.py --its 'own options'", "echo done"]
    assert console.commands_to_run == ["perfladder exec --until stages script.py --its 'own options'", "echo done"]


def test_every_mark_before_a_block_counts_for_it_alone(tmp_path):
    *_, console, last = read(tmp_path)
    assert console.marks == {"runs with": "--until stages"}
    assert last.marks == {"not run": "needs a GPU", "exits": "4"}
    assert not last.is_run
    assert [command.split()[:2] for command in last.commands] == [["perfladder", "run"]]


def test_commands_in_sentences_are_found_and_those_in_blocks_are_not(tmp_path):
    read(tmp_path)
    assert inline_commands(tmp_path / "page.md") == ["perfladder show latest --top 3"]


def run_steps(tmp_path, *steps):
    document = json.dumps([{"where": f"page.md:{line}", **step} for line, step in enumerate(steps)])
    command = [sys.executable, "-P", str(RUNNER)]
    return subprocess.run(command, input=document, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_blocks_share_names_and_a_wrong_exit_code_ends_the_page(tmp_path):
    ended = run_steps(
        tmp_path,
        {"kind": "python", "text": "def run(): return 7\n"},
        {"kind": "python", "text": "assert run() == 7\nassert __name__ == '__main__'\n"},
        {"kind": "sh", "text": "exit 4", "exits": "4"},
        {"kind": "sh", "text": "exit 5", "exits": "0"},
        {"kind": "python", "text": "open('too-far', 'w')\n"},
    )
    assert ended.returncode == 1
    assert "page.md:3: $ exit 5\nended with exit code 5, and not 0" in ended.stderr
    assert not (tmp_path / "too-far").exists()


def test_an_error_in_python_is_told_with_its_line(tmp_path):
    ended = run_steps(tmp_path, {"kind": "python", "text": "one = 1\none.two\n"})
    assert ended.returncode == 1
    assert 'File "page.md:0", line 2' in ended.stderr
    assert "one.two" in ended.stderr
