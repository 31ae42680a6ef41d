import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAPPED = {"perfladder.flows": "flows", "perfladder.skills_data": "skills", "perfladder.tasks": "tasks"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> list[str]:
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "perfladder").rglob("__init__.py")]
    packages = [folder.as_posix().replace("/", ".") for folder in folders]
    return sorted(packages + [name for name, folder in MAPPED.items() if (ROOT / folder / "__init__.py").is_file()])


def test_listed_packages_are_the_folders_with_an_init(project):
    assert sorted(project["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_top_level_folders_are_mapped_into_the_package(project):
    mapping = project["tool"]["setuptools"]["package-dir"]
    assert {name: mapping[name] for name in MAPPED} == MAPPED


def test_every_folder_with_code_is_a_package():
    for folder in ("perfladder", "tasks", "flows"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_data_files_are_covered_by_a_pattern(project):
    patterns = project["tool"]["setuptools"]["package-data"]["perfladder"]
    covered = {path for pattern in patterns for path in (ROOT / "perfladder").glob(pattern)}
    data = {
        path
        for path in (ROOT / "perfladder").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert data == covered & data
    assert {path.name for path in data} >= {"py.typed", "diffusion.yaml"}


@pytest.mark.slow
def test_wheel_holds_the_tree_and_no_top_level_flows_or_tasks(tmp_path, project):
    # A copy, since setuptools leaves a build folder that the next wheel would pick stale files from.
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info", "runs", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = set()
    for package in project["tool"]["setuptools"]["packages"]:
        folder = ROOT / MAPPED.get(package, package.replace(".", "/"))
        expected |= {f"{package.replace('.', '/')}/{path.name}" for path in folder.glob("*.py")}
    for pattern in project["tool"]["setuptools"]["package-data"]["perfladder"]:
        expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "perfladder").glob(pattern)}
    skills = [path.relative_to(ROOT / "skills").as_posix() for path in (ROOT / "skills").rglob("*.md")]
    assert {"perfladder/SKILL.md", "perfladder/docs/profiler.md"} < set(skills)
    expected |= {f"perfladder/skills_data/{path}" for path in skills}
    assert set(names) == expected
    assert {name.split("/")[0] for name in names} == {"perfladder"}
