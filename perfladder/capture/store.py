"""A capture as a folder: `manifest.json` beside `tensors.safetensors`, with SHA-256 sums checked before use."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from perfladder.capture.values import Node
from perfladder.errors import CaptureError
from perfladder.files import flush_to_disk, write_atomically
from perfladder.models import SCHEMA_VERSION, Model, newer_schema

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
_MAX_MANIFEST_BYTES = 64 << 20


class CallContext(Model):
    """Settings of torch that were in force when the stage was called."""

    grad_enabled: bool
    inference_mode: bool
    autocast_dtype: str | None
    training: bool | None


class CapturedCall(Model):
    """One call of the stage: what went in, what came out, and what surrounded it."""

    index: int
    inputs: dict[str, Node]
    output: Node
    context: CallContext
    rng: dict[str, Node]
    owner_state: dict[str, Node] = {}
    mutated: list[str] = []
    in_pipeline_ms: list[float] = []


class Manifest(Model):
    """What a capture folder holds."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    torch_version: str
    stage: str
    owner_type: str
    device: str
    work_digest: str
    calls_per_run: int
    calls: list[CapturedCall]
    num_storages: int
    num_bytes: dict[str, int] = {}
    sha256: dict[str, str]


def write_capture(folder: Path, manifest: Manifest, storages: list[torch.Tensor]) -> int:
    """Write a capture; the manifest comes last, so that a folder with one is complete. Returns its bytes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / TENSORS
    save_file({f"storage.{index}": storage for index, storage in enumerate(storages)}, tensors)
    flush_to_disk(tensors)
    num_bytes = tensors.stat().st_size
    manifest = manifest.model_copy(
        update={
            "sha256": {TENSORS: sha256_of(tensors)},
            "num_bytes": {TENSORS: num_bytes},
            "num_storages": len(storages),
        }
    )
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=1))
    return num_bytes + (folder / MANIFEST).stat().st_size


def read_manifest(folder: Path) -> Manifest:
    """Read and check a capture's manifest.

    Raises:
        CaptureError: No capture, a newer schema, or a damaged or oversized manifest.
    """
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CaptureError(f"{folder} is no capture: it has no {MANIFEST}.")
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise CaptureError(f"{path} is refused: it is larger than {_MAX_MANIFEST_BYTES >> 20} MiB.")
    text = path.read_bytes()
    if (version := newer_schema(text)) is not None:
        raise CaptureError(
            f"{path} has schema version {version}: a newer perfladder wrote it; this one reads up to {SCHEMA_VERSION}."
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise CaptureError(f"{path} is damaged: {error.errors()[0]['msg']}.") from error


def read_storages(folder: Path, manifest: Manifest) -> list[torch.Tensor]:
    """Read the raw tensors after their sum was checked.

    Raises:
        CaptureError: A link, a missing file, or a size or sum that differs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TENSORS
    if path.is_symlink() or not path.is_file():
        raise CaptureError(f"{path} is missing or a link.")
    num_bytes, expected = path.stat().st_size, manifest.num_bytes.get(TENSORS)
    if num_bytes != expected:
        raise CaptureError(f"{path} is refused: it has {num_bytes} bytes, and {MANIFEST} says {expected}.")
    if sha256_of(path) != manifest.sha256.get(TENSORS):
        raise CaptureError(f"{path} is damaged: its SHA-256 sum is not the one in {MANIFEST}.")
    try:
        tensors = load_file(path)
        return [tensors[f"storage.{index}"] for index in range(manifest.num_storages)]
    except KeyError as error:
        raise CaptureError(f"{path} has no {error}.") from error
    except SafetensorError as error:
        raise CaptureError(f"{path} is no safetensors file: {error}.") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
