"""The TensorRT that is installed: its Python bindings, what it logs, and whether it takes a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch

from perfladder.errors import NotPossibleHereError

LibraryName = Literal["tensorrt", "tensorrt_rtx"]

_TITLES: Final = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_MODULES: Final[dict[LibraryName, tuple[str, ...]]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
"""Names of the bindings; the packages for one CUDA version bring those of the second form only."""

_INSTALL: Final = {
    "tensorrt": "pip install tensorrt",
    "tensorrt_rtx": "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
}
DESCRIPTION: Final = "Layers:"
"""How a builder begins to describe the engine that it made, among the details."""
_FAILURES: Final = ("INTERNAL_ERROR", "ERROR")
_PLACE: Final = re.compile(r"\.?\s*\bIn \w+ at /\S+:\d+ *(?:\((.*)\))?")
_HEAD: Final = re.compile(r"^(?:\w+::\w+|\[[^\]]*\]): Error Code \d+: ")
_NOISE: Final = ("catchCudaError", "Thread context has not been set")
"""Logged as errors, also by builds that succeed on a machine without a GPU."""


class TensorRTLog:
    """What TensorRT said while this was open, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def failure(self) -> str:
        """The first error, without the places in the library's own source; empty if there was none."""
        for severity, message in self.lines:
            if severity in _FAILURES and not any(noise in message for noise in _NOISE):
                return _PLACE.sub(r"\1", _HEAD.sub("", message)).strip()
        return ""

    def text(self) -> str:
        """All but the details, a line each."""
        return "".join(f"[{severity}] {message}\n" for severity, message in self.lines if severity != "VERBOSE")


@dataclass(frozen=True)
class Library:
    """One of the two libraries.

    Attributes:
        name: Which.
        api: Its module of bindings.
        version: As it tells.
        logger: What its objects are made with; one for the process, since the library keeps the first one it is given.
    """

    name: LibraryName
    api: Any
    version: str
    logger: Any

    @property
    def title(self) -> str:
        """How it is called."""
        return f"{_TITLES[self.name]} {self.version}"

    @contextmanager
    def listening(self) -> Iterator[TensorRTLog]:
        """Collect what is logged inside the block, by any thread of this process."""
        log = TensorRTLog()
        self.logger.add(log)
        try:
            yield log
        finally:
            self.logger.remove(log)


def find_library(name: LibraryName | None) -> Library:
    """The library that was asked for, or without a name the first one that is there, TensorRT before TensorRT-RTX.

    Raises:
        NotPossibleHereError: It is not installed, or what is installed under its name is no TensorRT.
    """
    names = list(_MODULES) if name is None else [name]
    reasons = []
    for one in names:
        found = _imported(one)
        if isinstance(found, Library):
            return found
        reasons.append(found)
    raise NotPossibleHereError(f"{'; '.join(reasons)}. Next: {' or '.join(_INSTALL[one] for one in names)}.")


@lru_cache
def _imported(name: LibraryName) -> Library | str:
    reason = f"{_TITLES[name]} is not installed"
    for module in _MODULES[name]:
        if importlib.util.find_spec(module) is None:
            continue
        try:
            api = importlib.import_module(module)
        except Exception as error:  # packages that only hold a name raise what they like
            reason = f"{_TITLES[name]} cannot be imported ({type(error).__name__}: {error})"
            continue
        if all(hasattr(api, part) for part in ("Builder", "Runtime", "OnnxParser", "ILogger")):
            return Library(name, api, str(getattr(api, "__version__", "?")), _new_logger(api))
        reason = f"the package {module} that is installed only holds the name of {_TITLES[name]}"
    return reason


def _new_logger(api: Any) -> Any:
    class Logger(api.ILogger):
        """Hands messages to all that listen; the library calls it from threads of its own."""

        def __init__(self) -> None:
            api.ILogger.__init__(self)
            self._listeners: list[TensorRTLog] = []
            self._lock = threading.Lock()

        def add(self, listener: TensorRTLog) -> None:
            with self._lock:
                self._listeners.append(listener)

        def remove(self, listener: TensorRTLog) -> None:
            with self._lock:
                self._listeners.remove(listener)

        def log(self, severity: Any, message: str) -> None:
            # Details of a large network are longer than the network.
            if severity.name == "VERBOSE" and not message.startswith(DESCRIPTION):
                return
            with self._lock:
                for listener in self._listeners:
                    listener.lines.append((severity.name, message))

    return Logger()


def why_gpu_refused(library: Library, device: torch.device) -> str | None:
    """What the runtime says to an engine on a GPU, by trying one; None if it takes it."""
    index = device.index
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _why_refused(library.name, index or 0)


@lru_cache
def _why_refused(name: LibraryName, index: int) -> str | None:
    library = find_library(name)
    # Where torch sees no GPU, the runtime says so itself.
    if torch.cuda.is_available():
        with torch.cuda.device(index):
            refusal = _refusal(library)
    else:
        refusal = _refusal(library)
    return None if refusal is None else f"{library.title} refuses the GPU: {refusal}"


def _refusal(library: Library) -> str | None:
    with library.listening() as log:
        try:
            plan = _smallest_plan(library)
            engine = library.api.Runtime(library.logger).deserialize_cuda_engine(plan) if plan is not None else None
        except (TypeError, RuntimeError) as error:  # raised where the library cannot initialize CUDA
            return log.failure() or str(error)
    return None if engine is not None else log.failure() or "it gives no reason"


def _smallest_plan(library: Library) -> Any:
    api = library.api
    builder = api.Builder(library.logger)
    network = builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    given = network.add_input("input", api.DataType.FLOAT, (1,))
    doubled = network.add_elementwise(given, given, api.ElementWiseOperation.SUM).get_output(0)
    network.mark_output(doubled)
    return builder.build_serialized_network(network, builder.create_builder_config())
