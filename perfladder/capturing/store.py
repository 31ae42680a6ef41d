"""A capture as a folder: `manifest.json` beside `tensors.safetensors`, with SHA-256 sums checked before use."""

from __future__ import annotations

import hashlib
import json
import statistics
import struct
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from perfladder.capturing.nodes import Node
from perfladder.errors import CaptureError
from perfladder.files import flush_to_disk, sha256_of, write_atomically
from perfladder.models import SCHEMA_VERSION, Model, newer_schema

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
_MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 24


class CallContext(Model):
    """Settings of torch that were in force when the stage was called."""

    grad_enabled: bool
    inference_mode: bool
    autocast_dtype: str | None
    training: bool | None = None
    settings: dict[str, JsonValue] = Field(
        default={}, description="Backends, precision and threads by name, as `capture.context` reads and sets them."
    )


class CapturedCall(Model):
    """One call of the stage: what went in, what came out, and what surrounded it.

    What the call changed is kept as it was afterwards: `inputs_after` if it changed an input in place, `state_after`
    for the parts of the state that it changed.
    """

    index: int
    run: int = Field(default=0, description="In which of the captured runs.")
    inputs: dict[str, Node]
    output: Node
    context: CallContext
    rng: dict[str, Node]
    owner_state: dict[str, Node] = Field(default={}, description="What differs from the first captured call's.")
    mutated: list[str] = []
    inputs_after: dict[str, Node] = {}
    state_after: dict[str, Node] = {}
    side_effects: list[str] = []
    in_pipeline_ms: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default=[], description="Its duration in plain runs, one by one."
    )
    host_lead_ms: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default=[],
        description="How far the host was ahead of the device when it made the call in those runs, and no more than "
        "the call kept the host; none on a CPU.",
    )

    @property
    def lead_ms(self) -> float:
        """How far ahead the host is to be in a replay."""
        return statistics.median(self.host_lead_ms or [0.0])


class Manifest(Model):
    """What a capture folder holds."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    torch_version: str
    stage: str
    owner_type: str
    method: str | None = Field(
        default=None, description="The owner's method that is the stage; None: the module itself."
    )
    device: str
    work_digest: str
    calls_per_run: int
    calls: list[CapturedCall]
    owner_state: dict[str, Node] = Field(default={}, description="The stage's state at the first captured call.")
    storages: list[int] | None = Field(
        default=None, description="For each storage the block that it begins as; None: each is a block of its own."
    )
    num_storages: int = Field(description="Blocks in the file of tensors.")
    is_redacted: bool = False
    yardstick_ms: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default=[], description="A fixed piece of host work, timed beside the plain runs of `in_pipeline_ms`."
    )
    load_average_1m: float | None = None
    sm_clock_mhz: int | None = None
    num_bytes: dict[str, int] = {}
    sha256: dict[str, str]

    def state_before(self, call: CapturedCall) -> dict[str, Node]:
        """The stage's state when that call began."""
        return {**self.owner_state, **call.owner_state}


def write_capture(folder: Path, manifest: Manifest, blocks: list[torch.Tensor]) -> int:
    """Write a capture; the manifest comes last, so that a folder with one is complete. Returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = folder / TENSORS
    digest = _write_tensors(tensors, blocks)
    num_bytes = tensors.stat().st_size
    manifest = manifest.model_copy(
        update={"sha256": {TENSORS: digest}, "num_bytes": {TENSORS: num_bytes}, "num_storages": len(blocks)}
    )
    data = {"schema_version": SCHEMA_VERSION, **manifest.model_dump(mode="json", exclude_defaults=True)}
    text = json.dumps(data, indent=1)
    if len(text) > _MAX_MANIFEST_BYTES:
        raise CaptureError(f"The manifest would have {len(text) >> 20} MiB; at most {_MAX_MANIFEST_BYTES >> 20} fit.")
    write_atomically(folder / MANIFEST, text)
    return num_bytes + (folder / MANIFEST).stat().st_size


def _write_tensors(path: Path, blocks: list[torch.Tensor]) -> str:
    """Write a safetensors file and return its SHA-256; summed while it is written, which the library cannot do."""
    header: dict[str, dict[str, Any]] = {}
    start = 0
    for index, block in enumerate(blocks):
        header[f"storage.{index}"] = {
            "dtype": "U8",
            "shape": [block.nbytes],
            "data_offsets": [start, start + block.nbytes],
        }
        start += block.nbytes
    text = json.dumps(header).encode()
    # The format wants the numbers to begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    chunks: list[bytes | memoryview] = [struct.pack("<Q", len(text)) + text]
    for block in blocks:
        view = memoryview(block.numpy())  # type: ignore[arg-type]
        chunks += [view[at : at + _CHUNK_BYTES] for at in range(0, len(view), _CHUNK_BYTES)]
    digest = hashlib.sha256()

    def add_up() -> None:
        for chunk in chunks:
            digest.update(chunk)

    with ThreadPoolExecutor(1) as pool, path.open("wb", buffering=0) as file:
        summed = pool.submit(add_up)
        for chunk in chunks:
            _write_all(file, chunk)
        summed.result()
    flush_to_disk(path)
    return digest.hexdigest()


def _write_all(file: FileIO, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) or 0 :]


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
