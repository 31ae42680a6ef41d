"""The one table of device runtime and driver calls: which launch work, which make the host wait, which copy."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final


class CallKind(IntEnum):
    """What a runtime or driver call does, from the host's point of view."""

    OTHER = 0
    LAUNCH = 1
    SYNCHRONIZE = 2
    COPY = 3


# Names as CUPTI, roctracer and Level Zero write them; a version suffix such as `_v7000` or `_ptsz` may follow.
# Source: CUDA runtime and driver API references, HIP API reference, oneAPI Level Zero specification.
_PATTERNS: Final = (
    (CallKind.SYNCHRONIZE, re.compile(r"synchroni[sz]e", re.IGNORECASE)),
    (CallKind.COPY, re.compile(r"memcpy|^zeCommandListAppendMemoryCopy", re.IGNORECASE)),
    (CallKind.LAUNCH, re.compile(r"launch|memset|MemoryFill|USMFill", re.IGNORECASE)),
)


def classify_call(name: str) -> CallKind:
    """Return the kind of a runtime or driver call by its name, e.g. `cudaLaunchKernel`."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), CallKind.OTHER)


# A copy's kind as CUPTI and roctracer write it into the name: "Memcpy HtoD (Pageable -> Device)", "CopyHostToDevice".
_COPY_KINDS: Final = (
    ("HtoD", re.compile(r"HtoD|HostToDevice|H2D", re.IGNORECASE)),
    ("DtoH", re.compile(r"DtoH|DeviceToHost|D2H", re.IGNORECASE)),
    ("DtoD", re.compile(r"DtoD|DeviceToDevice|D2D", re.IGNORECASE)),
    ("PtoP", re.compile(r"PtoP|PeerToPeer|P2P", re.IGNORECASE)),
    ("HtoH", re.compile(r"HtoH|HostToHost|H2H", re.IGNORECASE)),
)
UNKNOWN_COPY: Final = "unknown"
COPY_KINDS: Final = (*(kind for kind, _ in _COPY_KINDS), UNKNOWN_COPY)


def classify_copy(name: str) -> str:
    """Return `HtoD`, `DtoH`, `DtoD`, `PtoP`, `HtoH` or `unknown` by the name of a device copy."""
    return next((kind for kind, pattern in _COPY_KINDS if pattern.search(name)), UNKNOWN_COPY)


_HOST_MEMORY: Final = re.compile(r"pageable|pinned|managed", re.IGNORECASE)


def classify_host_memory(name: str) -> str | None:
    """Return `pageable`, `pinned` or `managed` by the name of a device copy; None where it names no host memory."""
    found = _HOST_MEMORY.search(name)
    return found[0].lower() if found else None


_COMMUNICATION: Final = re.compile(r"nccl|rccl|^(mscclpp|oneccl|gloo:|c10d::|ucc:|hccl)", re.IGNORECASE)


def is_communication(name: str) -> bool:
    """Whether a kernel or host span is collective communication between ranks."""
    return bool(_COMMUNICATION.search(name))
