import ast
import json
import os
from pathlib import Path

import pytest
import torch

import perfladder.capturing
from perfladder.capturing import store
from perfladder.capturing.encode import Encoder
from perfladder.capturing.store import (
    MANIFEST,
    TENSORS,
    CallContext,
    CapturedCall,
    Manifest,
    read_manifest,
    read_storages,
    write_capture,
)
from perfladder.errors import CaptureError
from perfladder.models import SCHEMA_VERSION


@pytest.fixture
def folder(tmp_path):
    encoder = Encoder()
    nodes = encoder.encode({"args": (torch.arange(5.0), torch.empty(0), torch.tensor(3)), "kwargs": {}})
    call = CapturedCall(
        index=0,
        inputs=nodes,
        output=encoder.encode({"output": torch.ones(2)})["output"],
        context=CallContext(grad_enabled=False, inference_mode=False, autocast_dtype=None, training=False),
        rng={},
    )
    manifest = Manifest(
        perfladder_version="0",
        torch_version=torch.__version__,
        stage="unet",
        owner_type="x.Y",
        device="cpu",
        work_digest="0" * 16,
        calls_per_run=1,
        calls=[call],
        storages=encoder.storages,
        num_storages=0,
        sha256={},
    )
    num_bytes = write_capture(tmp_path / "capture", manifest, encoder.blocks)
    assert num_bytes == sum(path.stat().st_size for path in (tmp_path / "capture").iterdir())
    return tmp_path / "capture"


def read(folder: Path):
    manifest = read_manifest(folder)
    return manifest, read_storages(folder, manifest)


def refuse(folder, match):
    with pytest.raises(CaptureError, match=match):
        read(folder)


def rewrite(folder, **changes):
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_written_is_read(folder):
    manifest, storages = read(folder)
    assert manifest.stage == "unet"
    assert len(storages) == manifest.num_storages == 4
    assert storages[0].view(torch.float32).tolist() == [0, 1, 2, 3, 4]


def test_no_capture(tmp_path):
    refuse(tmp_path, r"is no capture: it has no manifest\.json")


def test_capture_without_a_manifest_is_none(folder):
    (folder / MANIFEST).unlink()
    refuse(folder, "is no capture")


def test_damaged_tensors_are_refused(folder):
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)
    refuse(folder, "is damaged: its SHA-256 sum")


def test_truncated_tensors_are_refused(folder):
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[:-8])
    refuse(folder, f"it has {len(data) - 8} bytes, and manifest.json says {len(data)}")


def test_oversized_tensors_are_refused_before_they_are_read(folder, monkeypatch):
    with (folder / TENSORS).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no disk
    monkeypatch.setattr(store, "sha256_of", lambda path: pytest.fail("it was read"))
    refuse(folder, f"it has {1 << 40} bytes")


def test_oversized_manifest_is_refused(folder):
    os.truncate(folder / MANIFEST, 65 << 20)
    refuse(folder, "larger than 64 MiB")


def test_damaged_manifest_is_refused(folder):
    path = folder / MANIFEST
    path.write_text(path.read_text()[:-100])
    refuse(folder, "manifest.json is damaged")


def test_manifest_with_unknown_fields_is_refused(folder):
    rewrite(folder, target="os:system")
    refuse(folder, "manifest.json is damaged: Extra inputs are not permitted")


def test_newer_schema_is_refused_as_such(folder):
    rewrite(folder, schema_version=SCHEMA_VERSION + 1, a_new_field=1)
    refuse(folder, f"schema version {SCHEMA_VERSION + 1}: a newer perfladder wrote it")


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_links_are_refused(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refuse(folder, "is no capture|is missing or a link")


def test_tensors_that_are_missing_are_refused(folder):
    (folder / TENSORS).unlink()
    refuse(folder, "is missing or a link")


def test_file_that_has_the_right_sum_but_is_no_safetensors_is_refused(folder):
    (folder / TENSORS).write_bytes(b"\x80\x04not tensors")
    size = (folder / TENSORS).stat().st_size
    rewrite(folder, sha256={TENSORS: store.sha256_of(folder / TENSORS)}, num_bytes={TENSORS: size})
    refuse(folder, "is no safetensors file")


def test_storage_that_is_missing_is_named(folder):
    rewrite(folder, num_storages=9)
    refuse(folder, r"has no 'storage\.4'")


def test_a_capture_half_written_over_an_older_one_is_refused(folder):
    """The manifest comes last: after a crash between the two files the old manifest does not fit the new tensors."""
    from safetensors.torch import save_file

    save_file({"storage.0": torch.zeros(3)}, folder / TENSORS)
    refuse(folder, "is refused|is damaged")


def test_nothing_is_unpickled_and_no_code_is_imported_by_name():
    forbidden = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "importlib", "runpy"}
    # The script beside a capture imports what its own table names; nobody imports the script.
    files = [path for path in Path(perfladder.capturing.__file__).parent.glob("*.py") if "standalone" not in path.name]
    for path in files:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            assert not names & forbidden, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                assert not (isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr == "load"), path


def test_reading_does_not_reach_pickle(folder, monkeypatch):
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    read(folder)
