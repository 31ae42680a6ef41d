"""Tuned modules in one file: original weights, what was chosen, and what builds wrote; nothing of it is a pickle."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import Field, JsonValue
from torch import nn

from perfladder import __version__
from perfladder.errors import InputError
from perfladder.models import Model
from perfladder.tuning.archive import write_archive
from perfladder.tuning.archive_format import FORMAT_VERSION
from perfladder.tuning.archive_names import archive_path
from perfladder.tuning.build_log import LOG_FILE
from perfladder.tuning.cache import code_digest, device_name, versions
from perfladder.tuning.control import ModuleControl
from perfladder.tuning.graphs import TableModel
from perfladder.tuning.records import DecisionRecord
from perfladder.tuning.timesteps import host_timesteps_in
from perfladder.tuning.wrap import wrapped_in

WEIGHTS: Final = "weights.safetensors"


class SavedChoice(Model):
    """What serves one graph."""

    graph: str
    backend: str | None = Field(description="Its name; None: the module itself.")
    config: dict[str, JsonValue] = {}
    description: str
    files: list[str] = Field(default=[], description="What its build wrote, relative to its folder.")
    record: DecisionRecord | None = None


class SavedModule(Model):
    """One tuned module."""

    path: str = Field(description="On the saved object; empty: the object itself.")
    name: str
    module_type: str
    device: str
    device_name: str
    code_digest: str
    same_tensors: dict[str, str] = Field(description="Names of the state dict whose tensor has another name already.")
    graphs: TableModel
    choices: list[SavedChoice]


class SavedScheduler(Model):
    """One scheduler that takes its timesteps from the host."""

    path: str = Field(description="On the saved object.")
    scheduler_type: str


class SavedManifest(Model):
    """What an archive holds."""

    format_version: int = FORMAT_VERSION
    perfladder_version: str = __version__
    created_at: str
    versions: dict[str, str] = Field(description="Of what decides the builds.")
    modules: list[SavedModule]
    schedulers: list[SavedScheduler] = []


def save(obj: Any, path: str | Path) -> Path:
    """Save the tuned modules of an object, with their original weights, and which schedulers have host timesteps.

    Args:
        obj: A tuned module, or what holds some.
        path: The archive, with the ending `.ait`, which is added if there is none. A bare name goes into the folder
            `checkpoints`. Beside it `<name>_sha256_sums.txt` is written.

    Returns:
        The archive's path.

    Raises:
        InputError: Nothing is tuned, the original weights were given up, or the path cannot be used.
        NotPossibleHereError: It cannot be written; a file that was there before stays as it was.
    """
    target = archive_path(path)
    controls = [control for control in wrapped_in(obj) if control.state == "tuned"]
    hosts = host_timesteps_in(obj)
    if not controls and not hosts:
        raise InputError("obj: it holds no tuned module; tune it with pl.tune first.")
    members: dict[str, bytes | Path] = {}
    with tempfile.TemporaryDirectory(prefix="perfladder-") as scratch:
        saved = []
        for number, control in enumerate(controls):
            weights = Path(scratch) / f"{number}.safetensors"
            same = _write_weights(control, weights)
            members[f"{number}/{WEIGHTS}"] = weights
            saved.append(_saved_module(control, number, same, members))
        backends = [chosen.backend for control in controls for chosen in control.chosen if chosen.backend is not None]
        manifest = SavedManifest(
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(name for backend in backends for name in backend.libraries),
            modules=saved,
            schedulers=[
                SavedScheduler(path=path, scheduler_type=type_of(host.scheduler)) for path, host in hosts.items()
            ],
        )
        write_archive(target, members, manifest)
    return target


def _write_weights(control: ModuleControl, path: Path) -> dict[str, str]:
    """Write the state dict; returns the names of tensors that lie there under another name."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in control.inner.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{control.name}: {name} of its state is a {type(tensor).__name__}, no tensor.")
        if tensor.device.type == "meta":
            raise InputError(
                f"{control.name}: its original weights were given up (config.device_after_tuning = 'meta'), so that it "
                "cannot be saved."
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise InputError(f"{control.name}: {name} is a {type(tensor).__name__}, which an archive cannot hold.")
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            same[name] = first[key]
            continue
        first[key] = name
        # A view of another tensor's memory is written by itself.
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    save_file(tensors, path)
    return same


def _saved_module(
    control: ModuleControl, number: int, same: dict[str, str], members: dict[str, bytes | Path]
) -> SavedModule:
    inner = control.inner
    assert control.table is not None, "it is tuned"
    choices = []
    for chosen in control.chosen:
        files = _files_in(chosen.folder) if chosen.backend is not None else {}
        members |= {f"{number}/{chosen.graph.name}/{name}": file for name, file in files.items()}
        choices.append(
            SavedChoice(
                graph=chosen.graph.name,
                backend=chosen.backend.name if chosen.backend else None,
                config=chosen.backend.config.model_dump(mode="json") if chosen.backend else {},
                description=chosen.description,
                files=list(files),
                record=_without_logs(chosen.record),
            )
        )
    return SavedModule(
        path=control.path or "",
        name=control.name,
        module_type=type_of(inner),
        device=str(control.device),
        device_name=device_name(control.device),
        code_digest=code_digest(inner),
        same_tensors=same,
        graphs=control.table.to_model(),
        choices=choices,
    )


def _files_in(folder: Path | None) -> dict[str, Path]:
    if folder is None or not folder.is_dir():
        return {}
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / LOG_FILE)
    return {str(file.relative_to(folder)): file for file in files}


def _without_logs(record: DecisionRecord | None) -> DecisionRecord | None:
    """Logs stay on the machine that built: they tell its paths."""
    if record is None:
        return None
    candidates = [candidate.model_copy(update={"log_file": None}) for candidate in record.candidates]
    return record.model_copy(update={"candidates": candidates})


def type_of(module: Any) -> str:
    """The full name of its class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
