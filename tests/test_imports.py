"""Arrows point one way, and what must answer at once imports nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE_NEVER = {"prefect", "mlflow", "tasks", "flows"}


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere, in dotted form; relative ones as absolute."""
    package = _package_of(path)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def _package_of(path: Path) -> str:
    relative = path.relative_to(ROOT).parent.as_posix().replace("/", ".")
    return relative if relative.startswith("perfladder") else f"perfladder.{relative}"


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def reaches(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def offences(files, packages):
    found = {}
    for path in files:
        names = imported(path)
        bad = set().union(*(reaches(names, package) for package in packages))
        if bad:
            found[str(path.relative_to(ROOT))] = sorted(bad)
    return found


def test_engine_imports_no_orchestration():
    # The command line is where both meet: it may start the flow, inside the one verb that runs it.
    files = [path for path in python_files("perfladder") if path.stem != "cli" and not path.name.startswith("cli_")]
    assert offences(files, ENGINE_NEVER | {"perfladder.tasks", "perfladder.flows"}) == {}


def test_command_line_imports_flows_only_inside_functions():
    tree = ast.parse((ROOT / "perfladder" / "cli.py").read_text())
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top for alias in node.names} | {getattr(node, "module", None) or "" for node in top}
    assert not {
        name for name in names if name.startswith(("perfladder.flows", "perfladder.tasks", "prefect", "mlflow"))
    }


def test_tasks_import_no_flows():
    assert offences(python_files("tasks"), {"perfladder.flows", "flows"}) == {}


def test_nothing_imports_the_top_level_names_of_the_repository():
    assert offences(python_files("perfladder", "tasks", "flows"), {"tasks", "flows", "tests"}) == {}


def test_optional_libraries_are_imported_inside_functions():
    """`import perfladder.x` works with the base install alone."""
    optional = (
        "prefect",
        "mlflow",
        "diffusers",
        "transformers",
        "torchao",
        "tensorrt",
        "tensorrt_rtx",
        "tensorrt_rtx_bindings",
        "modelopt",
        "torch_tensorrt",
        "onnx",
        "ray",
        "dask",
        "ncu_report",
    )
    for path in python_files("perfladder"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in optional], path


def test_private_attributes_of_torch_live_in_one_module():
    found = []
    for path in python_files("perfladder"):
        if path.name == "_torch_private.py":
            continue
        for name in imported(path):
            if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")[1:]):
                found.append((path.name, name))
    assert found == []


@pytest.mark.parametrize("module", ["perfladder", "perfladder.cli", "perfladder.workload", "perfladder.session"])
def test_import_brings_no_torch(module):
    heavy = ("torch", "numpy", "prefect", "mlflow", "scipy", "pandas", "diffusers", "transformers")
    if module == "perfladder.session":
        heavy = tuple(name for name in heavy if name != "numpy")
    source = f"import sys, {module}; print([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_public_names_are_there_and_listed():
    import perfladder

    for name in perfladder.__all__:
        assert getattr(perfladder, name) is not None
    assert set(perfladder.__all__) <= set(dir(perfladder))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        perfladder.no_such_name  # noqa: B018


def test_no_file_of_the_engine_reads_environment_variables():
    """State is passed, not found: whoever starts the engine hands the variables over."""
    # Where Inductor keeps its files can be told to torch in no other way.
    allowed = {
        "ladder.py",
        "target.py",
        "config.py",
        "inductor_folder.py",
    }
    for path in python_files("perfladder"):
        if path.name in allowed or path.stem == "cli" or path.name.startswith("cli_"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv"), path


def test_the_process_that_climbs_brings_neither_torch_nor_the_servers_clients():
    source = (
        "import sys, perfladder.ladder, perfladder.report, perfladder.flows.run, perfladder.flows.config\n"
        "for rung in perfladder.ladder.RUNGS: rung.module\n"
        "print([n for n in ('torch', 'scipy', 'prefect', 'mlflow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
