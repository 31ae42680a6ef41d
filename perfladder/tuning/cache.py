"""What earlier tunings found, by what they were about: weights, code, form of call, versions, device."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import ValidationError
from torch import nn

from perfladder._torch_private import compile_counters
from perfladder.errors import NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import digest
from perfladder.tuning.inductor_folder import inductor_cache
from perfladder.tuning.records import CandidateRecord

if TYPE_CHECKING:
    from perfladder.tuning.graphs import GraphSpec

_logger = logging.getLogger("perfladder.tuning")

_LIBRARIES: Final = ("torch", "triton", "torchao", "transformers", "diffusers", "perfladder")
_RECORDS: Final = "records"
_SHARED: Final = "shared"
_INDUCTOR: Final = "inductor"


class BuildCache:
    """One folder, the user's own: a record for each candidate, what builds write and share, and Inductor's own cache.

    Args:
        root: The folder; made if it is not there.

    Raises:
        NotPossibleHereError: It cannot be made or written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            for folder in (root, root / _RECORDS, self.inductor_folder, root / _SHARED):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise NotPossibleHereError(
                f"cache_dir: the folder {root} cannot be made: {error.strerror}. Set config.cache_dir (--cache-dir, "
                "PERFLADDER_CACHE_DIR) to one that you may write to."
            ) from error
        if not os.access(root / _RECORDS, os.W_OK):
            raise NotPossibleHereError(
                f"cache_dir: {root} may not be written to. Set config.cache_dir (--cache-dir, PERFLADDER_CACHE_DIR) to "
                "one that you may write to."
            )

    def read(self, key: str) -> CandidateRecord | None:
        """The record of that key; None if there is none, or none that can be read."""
        try:
            return CandidateRecord.model_validate_json((self.root / _RECORDS / f"{key}.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            _logger.warning("The record %s in %s cannot be used and is made anew: %s", key, self.root, error)
            return None

    def read_number(self, key: str) -> int | None:
        """A whole number that was kept by that key; None if there is none."""
        try:
            return int((self.root / _RECORDS / f"{key}.txt").read_text())
        except (OSError, ValueError):
            return None

    def write_number(self, key: str, number: int) -> None:
        """Keep a whole number."""
        write_atomically(self.root / _RECORDS / f"{key}.txt", str(number))

    def forget(self, key: str) -> None:
        """Drop a record."""
        (self.root / _RECORDS / f"{key}.json").unlink(missing_ok=True)

    def write(self, key: str, record: CandidateRecord) -> None:
        """Keep a record; where that fails, as on a full disk, only the next tuning suffers."""
        try:
            write_atomically(self.root / _RECORDS / f"{key}.json", record.model_dump_json())
        except OSError as error:
            _logger.warning(
                "The record of %s cannot be kept in %s, and is made anew next time: %s",
                record.description,
                self.root,
                error,
            )

    def build_folder(self, module: str, graph: str) -> Path:
        """For what builds of one graph write."""
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in module)
        return self.root / "builds" / (safe.lstrip(".") or "_") / graph

    @property
    def shared_folder(self) -> Path:
        """For what builds leave to later ones, such as timings."""
        return self.root / _SHARED

    @property
    def inductor_folder(self) -> Path:
        """For Inductor's own files."""
        return self.root / _INDUCTOR

    def inductor(self) -> AbstractContextManager[None]:
        """Let Inductor keep its files here inside the block, for this process."""
        return inductor_cache(self.inductor_folder)

    def compiled_here(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Let Inductor use its files here in the first calls, up to one in which it compiled nothing.

        Where the folder may not be written to any more, Inductor takes its own.
        """
        is_compiled = False

        def cached(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_compiled
            if is_compiled:
                return call(*args, **kwargs)
            before = compile_counters()
            with self.inductor() if self._may_write_inductor() else nullcontext():
                result = call(*args, **kwargs)
            is_compiled = not compile_counters().since(before).graphs
            return result

        return cached

    def _may_write_inductor(self) -> bool:
        try:
            self.inductor_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            return False
        return os.access(self.inductor_folder, os.W_OK)

    def clear(self) -> None:
        """Remove what is in the folder, and nothing else that somebody put there."""
        for name in (_RECORDS, "builds", _INDUCTOR, _SHARED):
            with suppress(FileNotFoundError):
                shutil.rmtree(self.root / name)
        self.__init__(self.root)  # type: ignore[misc]


def content_key(module: nn.Module, graph: GraphSpec, device: torch.device) -> str:
    """What identifies a graph of a module here: a change of any part makes another key.

    Weights and buffers by SHA-256, code by that of the source files of all classes in the module (of installed
    libraries by version), attributes that are plain values, the graph's form and sizes, versions, device, threads.
    """
    form = [
        [spec.model_dump(mode="json") for spec in graph.inputs],
        [[*spec.identity] for spec in (*graph.others, *graph.unsupported)],
    ]
    return digest([*_module_parts(module), *form, *_machine_parts(device)])


def form_key(module: nn.Module, graph: GraphSpec, device: torch.device, *, strict: bool) -> str:
    """The same without the graph's sizes, so that one call is enough to know it."""
    form = sorted(map(repr, graph.identity(strict=strict)))
    return digest([*_module_parts(module), form, *_machine_parts(device)])


def _module_parts(module: nn.Module) -> list[Any]:
    return [weights_digest(module), code_digest(module), _settings(module)]


def _machine_parts(device: torch.device) -> list[Any]:
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return [versions(), device_name(device), threads, torch.get_float32_matmul_precision()]


def weights_digest(module: nn.Module) -> str:
    """SHA-256 over all parameters and buffers, with their names, dtypes and shapes."""
    total = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        if tensor.device.type != "meta":
            total.update(_bytes_of(tensor))
    return total.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    with torch.no_grad():
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def code_digest(module: nn.Module) -> str:
    """SHA-256 over the source of the module's classes, and over the structure of the module."""
    kinds = {type(part) for part in module.modules()}
    sources = sorted({source_of(kind) for kind in kinds})  # type: ignore[arg-type]
    structure = [f"{name}:{type(part).__qualname__}" for name, part in module.named_modules()]
    return digest([sources, structure])


@lru_cache(maxsize=1024)
def source_of(kind: type) -> str:
    """A library's name and version, the SHA-256 of a source file, or of the code where there is no file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is not None and _is_installed(file):
        package = kind.__module__.partition(".")[0]
        return f"{package} {version_of(package)}"
    if file is not None and Path(file).is_file():
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    functions = [function for function in vars(kind).values() if inspect.isfunction(function)]
    return digest([_code_parts(function.__code__) for function in functions])


def function_digest(function: Any) -> str:
    """SHA-256 over what a function does and the values that it refers to, or over the class of another callable."""
    code = getattr(function, "__code__", None)
    if code is None:
        return digest([source_of(type(function)), repr(function)])  # type: ignore[arg-type]
    cells = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return digest([_code_parts(code), cells, repr(function.__defaults__)])


def _code_parts(code: types.CodeType) -> list[Any]:
    constants = [_code_parts(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return [code.co_name, code.co_code.hex(), list(code.co_names), constants]


def _is_installed(file: str) -> bool:
    return any(file.startswith(sysconfig.get_path(name) + os.sep) for name in ("purelib", "platlib", "stdlib"))


def _settings(module: nn.Module) -> list[Any]:
    """Plain attributes, such as epsilon or the number of heads, which decide what the code does."""
    plain = (bool, int, float, str, type(None))
    found = []
    for name, part in module.named_modules():
        own: Mapping[str, Any] = vars(part)
        values = {key: repr(v) for key, v in own.items() if isinstance(v, plain) or _is_plain_tuple(v, plain)}
        found.append([name, sorted(values.items())])
    return found


def _is_plain_tuple(value: Any, plain: tuple[type, ...]) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, plain) for item in value)


def versions(libraries: Iterable[str] = ()) -> dict[str, str]:
    """Of Python, of the libraries that decide what is built, and of others by the names that they are installed by."""
    return {"python": platform.python_version(), **library_versions([*_LIBRARIES, *libraries])}


def library_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Installed versions by name; `none` where one is not installed."""
    return {name: version_of(name) for name in libraries}


@lru_cache(maxsize=256)
def version_of(package: str) -> str:
    """The version of an installed package, or `none`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def device_name(device: torch.device) -> str:
    """The kind of a device, such that what was built for one runs on another of the same kind."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
