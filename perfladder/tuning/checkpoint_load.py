"""Tuned modules out of one file, into an object that was built as the saved one was: all is checked, then changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import nn

from perfladder.backend.base import Backend, BuildRequest
from perfladder.backend.registry import find_backend
from perfladder.errors import ArchiveError, InputError, PerfladderError
from perfladder.object_parts import attribute_at
from perfladder.text import near_names
from perfladder.tuning.archive import Archive, open_archive
from perfladder.tuning.archive_names import find_archive
from perfladder.tuning.cache import BuildCache, code_digest, device_name, versions
from perfladder.tuning.checkpoint import (
    WEIGHTS,
    SavedChoice,
    SavedManifest,
    SavedModule,
    SavedScheduler,
    type_of,
)
from perfladder.tuning.config import config
from perfladder.tuning.control import Chosen, ModuleControl
from perfladder.tuning.graphs import GraphTable
from perfladder.tuning.logs import only_own_messages
from perfladder.tuning.module import Module, control_of
from perfladder.tuning.timesteps import HostTimesteps, scheduler_at
from perfladder.tuning.wrap import replace_modules

if TYPE_CHECKING:
    from perfladder.tuning.graphs import GraphSpec

_logger = logging.getLogger("perfladder.tuning")


def load(
    obj: Any,
    path: str | Path,
    device_map: Mapping[str, str | torch.device] | None = None,
    *,
    modules: Sequence[str] | None = None,
    trust: bool = False,
    disable_external_logging: bool = True,
) -> Any:
    """Put saved modules into a freshly built object: their weights, and what serves their calls.

    Everything is checked before anything is changed. What compilers build in memory is built again, at the first call
    of each form; files of builds are used only where versions and device are those of the archive.

    Args:
        obj: Built as the saved one was, with any weights.
        path: The archive; `.ait` is added if there is no ending. A bare name is looked for as it is, where
            `perfladder tune --save` writes it, and then in the folder `checkpoints`, where `save` does.
        device_map: Devices of modules by path; others stay where they are.
        modules: Paths of those to load, of schedulers too; None: all of them.
        trust: Also use files that are code, as some backends write: these can do whatever your own code can.
        disable_external_logging: Mute log handlers for all but perfladder's own messages, during this call.

    Returns:
        The object; for a module that was saved by itself its wrapper.

    Raises:
        ArchiveError: There is no such archive, it is refused, or it does not fit the object.
        InputError: An argument is wrong, or a backend is not known here.
    """
    target = find_archive(path)
    with ExitStack() as stack:
        if disable_external_logging:
            stack.enter_context(only_own_messages())
        archive = stack.enter_context(open_archive(target))
        manifest = _manifest_of(archive)
        devices = device_map if device_map is not None else {}
        wanted = _wanted(manifest, modules, devices)
        schedulers = [_scheduler(archive, entry, obj) for entry in manifest.schedulers if _is_in(entry, modules)]
        plans = [_plan(archive, manifest, entry, obj, devices.get(entry.path), trust) for entry in wanted]
        for plan in plans:
            obj = _put_in_place(plan, obj)
        for scheduler in schedulers:
            HostTimesteps(scheduler)
    return obj


def list_modules(path: str | Path) -> list[str]:
    """Paths of the modules that an archive holds, on the object that they were saved from.

    Raises:
        ArchiveError: There is no such archive, or it is refused.
        InputError: It cannot be the name of one.
    """
    with open_archive(find_archive(path)) as archive:
        return [entry.path for entry in _manifest_of(archive).modules]


def _manifest_of(archive: Archive) -> SavedManifest:
    try:
        return SavedManifest.model_validate_json(archive.manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArchiveError(f"{archive.path} is damaged: {where}: {first['msg']}.") from None


def _wanted(manifest: SavedManifest, modules: Sequence[str] | None, device_map: Mapping[str, Any]) -> list[SavedModule]:
    known = [entry.path for entry in manifest.modules]
    schedulers = [entry.path for entry in manifest.schedulers]
    if isinstance(modules, str):
        raise InputError(f"modules: expected a list of paths, such as [{modules!r}], not a text.")
    if not isinstance(device_map, Mapping):
        raise InputError(
            f"device_map: expected devices by path of module, as in {{'unet': 'cuda'}}, got {device_map!r}."
        )
    for field, paths, names in (
        ("modules", modules or (), [*known, *schedulers]),
        ("device_map", device_map, known),
    ):
        for path in paths:
            if path not in names:
                raise InputError(f"{field}: {path!r} is not in the archive. {near_names(path, names, 'modules')}")
    for path, device in device_map.items():
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise InputError(
                f"device_map: {device!r} for {path!r} is no device; expected cpu, cuda, cuda:1 and so on."
            ) from None
    return [entry for entry in manifest.modules if modules is None or entry.path in modules]


def _is_in(entry: SavedScheduler, modules: Sequence[str] | None) -> bool:
    return modules is None or entry.path in modules


def _scheduler(archive: Archive, entry: SavedScheduler, obj: Any) -> Any:
    """The scheduler that an entry is about."""
    try:
        found = scheduler_at(obj, entry.path, field_name="obj")
    except InputError as error:
        raise ArchiveError(f"{archive.path} does not fit this {type(obj).__name__}. {error}") from None
    if type_of(found) != entry.scheduler_type:
        raise ArchiveError(f"{archive.path}: {entry.path} is a {entry.scheduler_type}, but here is a {type_of(found)}.")
    return found


@dataclass(frozen=True, eq=False)
class _Plan:
    """One module, all of it checked."""

    entry: SavedModule
    path: str
    module: nn.Module
    device: torch.device
    weights: dict[str, torch.Tensor]
    table: GraphTable
    backends: list[tuple[SavedChoice, Backend | None, Path]]


def _plan(
    archive: Archive,
    manifest: SavedManifest,
    entry: SavedModule,
    obj: Any,
    device: str | torch.device | None,
    trust: bool,
) -> _Plan:
    path, module = _find(archive, manifest, entry, obj)
    if type_of(module) != entry.module_type:
        raise ArchiveError(f"{archive.path}: {entry.name} is a {entry.module_type}, but here is a {type_of(module)}.")
    current = ModuleControl(module, entry.name, None, None, None).device
    wanted = torch.device(device) if device is not None else current
    number = manifest.modules.index(entry)
    weights = _read_weights(archive, f"{number}/{WEIGHTS}", entry, module)
    if code_digest(module) != entry.code_digest:
        _logger.warning("%s: its code differs from that of the archive, which was tuned and checked", entry.name)
    try:
        table = GraphTable.from_model(entry.graphs)
    except PerfladderError as error:
        raise ArchiveError(f"{archive.path} is damaged: the graphs of {entry.name}: {error}") from None
    backends = []
    names = {graph.name for graph in table.graphs}
    for choice in entry.choices:
        if choice.graph not in names:
            raise ArchiveError(f"{archive.path} is damaged: {entry.name} has no graph {choice.graph!r}.")
        backend = _backend_of(archive, choice)
        _check_environment(archive, manifest, entry, choice, backend, wanted, trust)
        folder = BuildCache(config.cache_dir).root / "loaded" / archive.sums[f"{number}/{WEIGHTS}"][:16] / choice.graph
        for name in choice.files:
            archive.extract(f"{number}/{choice.graph}/{name}", folder)
        backends.append((choice, backend, folder / f"{number}/{choice.graph}"))
    return _Plan(entry, path, module, wanted, weights, table, backends)


def _find(archive: Archive, manifest: SavedManifest, entry: SavedModule, obj: Any) -> tuple[str, nn.Module]:
    """The module that an entry is about, as it was before any wrapping."""
    # A module that was saved as part of a pipeline may be loaded by itself.
    is_itself = isinstance(obj, nn.Module) and len(manifest.modules) == 1 and not _has_module(obj, entry)
    path = "" if is_itself else entry.path
    try:
        found = attribute_at(obj, path, field_name="obj")
    except InputError as error:
        raise ArchiveError(f"{archive.path} does not fit this {type(obj).__name__}. {error}") from None
    if not isinstance(found, nn.Module):
        raise ArchiveError(f"{archive.path} does not fit: {path!r} is a {type(found).__name__} here, no module.")
    return path, control_of(found).inner if isinstance(found, Module) else found


def _has_module(obj: nn.Module, entry: SavedModule) -> bool:
    """Whether an object has at the saved place a module of the saved class."""
    try:
        found = attribute_at(obj, entry.path, field_name="obj")
    except InputError:
        return False
    return isinstance(found, nn.Module) and type_of(found) == entry.module_type


def _read_weights(archive: Archive, name: str, entry: SavedModule, module: nn.Module) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        stored = load(archive.read(name, archive.num_bytes(name)))
        weights = {**stored, **{other: stored[first] for other, first in entry.same_tensors.items()}}
    except (SafetensorError, KeyError) as error:
        raise ArchiveError(f"{archive.path} is damaged: the weights of {entry.name}: {error}.") from None
    here = module.state_dict()
    for key in dict.fromkeys([*here, *weights]):
        if key not in here or key not in weights:
            where = "the archive" if key in weights else "the module here"
            raise ArchiveError(f"{archive.path} does not fit: {entry.name}.{key} is only in {where}.")
        there, now = _told(weights[key]), _told(here[key])
        if there != now:
            raise ArchiveError(
                f"{archive.path} does not fit: {entry.name}.{key} is {there} there, and {now} here. Build the object "
                "as the saved one was."
            )
        if here[key].device.type == "meta":
            raise InputError(f"obj: {entry.name}.{key} is on the meta device; build the object with real weights.")
    return weights


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _backend_of(archive: Archive, choice: SavedChoice) -> Backend | None:
    if choice.backend is None:
        return None
    kind = find_backend(choice.backend)
    try:
        return kind(kind.config_class.model_validate(choice.config))
    except (ValidationError, PerfladderError) as error:
        raise ArchiveError(f"{archive.path}: the options of {choice.description} are not valid here: {error}") from None


def _check_environment(
    archive: Archive,
    manifest: SavedManifest,
    entry: SavedModule,
    choice: SavedChoice,
    backend: Backend | None,
    device: torch.device,
    trust: bool,
) -> None:
    """Refuse what cannot be used here, and tell what is built again."""
    if backend is None:
        return
    if reason := backend.why_not_load(device):
        raise ArchiveError(f"{archive.path}: {entry.name} needs {choice.description}, which is not possible: {reason}.")
    if choice.files and backend.writes_code and not trust:
        raise ArchiveError(
            f"{archive.path}: {choice.description} of {entry.name} comes with files that are code. Load it with "
            "trust=True only if you know where the archive is from."
        )
    here = {**versions(backend.libraries), "device": device_name(device)}
    there = {**manifest.versions, "device": entry.device_name}
    changed = [
        f"{name} {there.get(name, 'none')} there, {value} here"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if not changed:
        return
    if not backend.is_portable:
        raise ArchiveError(
            f"{archive.path}: {choice.description} of {entry.name} was built for another environment "
            f"({'; '.join(changed)}). Tune again here."
        )
    _logger.warning("%s: %s is built again here (%s)", entry.name, choice.description, "; ".join(changed))


def _put_in_place(plan: _Plan, obj: Any) -> Any:
    """Load the weights and wrap; this is all that changes the object."""
    entry, module = plan.entry, plan.module
    module.to(plan.device)
    module.load_state_dict(plan.weights, strict=True)
    module.eval()
    wrapper: Any = Module(module, entry.name)
    control = control_of(wrapper)
    control.path = plan.path
    cache = BuildCache(config.cache_dir)
    graphs = {graph.name: graph for graph in plan.table.graphs}
    with cache.inductor():
        chosen = [
            _served(control, graphs[choice.graph], choice, backend, folder, plan.device, cache)
            for choice, backend, folder in plan.backends
        ]
    control.set_tuned(plan.table, chosen, config.snapshot())
    if not plan.path:
        return wrapper
    there = attribute_at(obj, plan.path, field_name="obj")
    replace_modules(obj, [(plan.path, there, wrapper)], "obj")
    return obj


def _served(
    control: ModuleControl,
    graph: GraphSpec,
    choice: SavedChoice,
    backend: Backend | None,
    folder: Path,
    device: torch.device,
    cache: BuildCache,
) -> Chosen:
    if backend is None:
        return Chosen(graph, None, choice.description, record=choice.record)
    request = BuildRequest(control.inner, control.plain, graph, (), device, folder, cache.shared_folder)
    built = backend.build(request, is_saved=True)
    call = cache.compiled_here(built.call)  # an archive has no samples, so that compilers begin at the first call
    return Chosen(graph, call, choice.description, backend, folder, choice.record, built.owns_weights)
