"""The first part of `replay.py`: the files of a capture, the values in them, and how values are compared.

`script.py` joins it with the other parts. Only torch and the standard library are imported.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

# [code]
# [filled in for each capture]
STAGE: str = ""
TARGET: str | None = None  # "module:factory" or "file.py:factory"; None: the pipeline was an object in a notebook
TARGET_ARGS: dict[str, Any] = {}
TARGET_MODULE: str | None = None  # under which name a file of TARGET is imported
BASE_DIR: str = "."
DEVICE: str = "cpu"
DTYPE: str | None = None
SEED: int = 0
ATTENTION: str | None = None
COMPILE: dict[str, Any] | None = None  # {"mode": of torch.compile, "only": paths}
NVTX_RANGE: str = "replay"  # around the call that --nvtx makes
CLASSES: dict[str, tuple[Any, ...]] = {}  # qualified name: (module, name, how it is rebuilt)
# [end]

HERE = Path(__file__).resolve().parent
TENSORS = "tensors.safetensors"
ABSENT = object()
Difference = tuple[str, float, float]  # reason, largest error, the same relative to the largest value
np: Any = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None


class ReplayError(Exception):
    """Something is wrong with the capture or the options; the message is for the user."""


# --- the capture's files


def read_manifest() -> dict[str, Any]:
    """What was captured: nodes that describe values, and point into the tensors' file."""
    try:
        manifest: dict[str, Any] = json.loads((HERE / "manifest.json").read_bytes())
    except FileNotFoundError:
        raise ReplayError(f"there is no manifest.json in {HERE}") from None
    except ValueError as error:
        raise ReplayError(f"manifest.json is damaged: {error}") from None
    if missing := {"calls", "storages", "num_storages", "sha256", "owner_type"} - set(manifest):
        raise ReplayError(f"manifest.json is damaged: it has no {', '.join(sorted(missing))}")
    return manifest


def read_blocks(manifest: dict[str, Any]) -> list[torch.Tensor]:
    """The raw memories as bytes, mapped from the file after its sum was checked."""
    path = HERE / TENSORS
    if not path.is_file():
        raise ReplayError(f"{path} is missing; only --synthetic works without it")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"].get(path.name):
            raise ReplayError(f"{path} is damaged: its SHA-256 sum is not the one in manifest.json")
        file.seek(0)
        start = 8 + int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(start - 8))
            spans = [header[f"storage.{index}"]["data_offsets"] for index in range(manifest["num_storages"])]
        except (ValueError, KeyError, OverflowError) as error:
            raise ReplayError(f"{path} is no safetensors file of this capture: {error!r}") from None
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[start:]
    return [data[low:high] for low, high in spans]


def below(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A node and all inside it, but nothing of a generator's."""
    yield node
    for item in [] if node["kind"] == "generator" else node.get("items") or []:
        yield from below(item)


def tensors_in(*nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Every tensor below some nodes."""
    return [inner["tensor"] for node in nodes for inner in below(node) if "tensor" in inner]


def labels(*nodes: dict[str, Any], made: bool = False) -> set[int]:
    """Numbers of the objects below some nodes that are met in several places; `made`: only where they are made."""
    inside = [inner for node in nodes for inner in below(node)]
    met = set() if made else {inner["value"] for inner in inside if inner["kind"] == "same"}
    return met | {inner["label"] for inner in inside if "label" in inner}


def end_of(tensor: dict[str, Any]) -> int:
    """How many bytes of its storage a tensor reaches over."""
    if 0 in tensor["size"]:
        return 0
    last = sum((length - 1) * step for length, step in zip(tensor["size"], tensor["stride"], strict=True))
    return int(tensor["offset"] + last + 1) * getattr(torch, tensor["dtype"]).itemsize


def synthetic_blocks(manifest: dict[str, Any], real: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Random numbers for the inputs: normal ones, and integers within the captured range (0 without the file)."""
    storages = manifest["storages"]
    blocks = list(real) if real else [torch.empty(0, dtype=torch.uint8)] * manifest["num_storages"]
    state = [*manifest.get("owner_state", {}).values()]
    state += [node for call in manifest["calls"] for node in call.get("owner_state", {}).values()]
    rng = [node for call in manifest["calls"] for node in call["rng"].values()]
    inputs = [node for call in manifest["calls"] for node in call["inputs"].values()]
    kept = {storages[tensor["storage"]] for tensor in tensors_in(*state, *rng)} if real else set()
    sizes: dict[int, int] = {}
    dtypes: dict[int, torch.dtype] = {}
    for tensor in tensors_in(*inputs, *state):
        block = storages[tensor["storage"]]
        sizes[block] = max(sizes.get(block, 0), end_of(tensor))
        dtypes.setdefault(block, getattr(torch, tensor["dtype"]))
    seed = torch.Generator().manual_seed(SEED)
    for block in sizes.keys() - kept:
        blocks[block] = random_block(dtypes[block], sizes[block], real[block] if real else None, seed)
    return blocks


def random_block(dtype: torch.dtype, num_bytes: int, real: torch.Tensor | None, seed: torch.Generator) -> torch.Tensor:
    """Bytes that hold random numbers of one dtype."""
    num = -(-(num_bytes if real is None else real.numel()) // dtype.itemsize)
    if dtype == torch.bool:
        values = torch.randint(0, 2, (num,), generator=seed)
    elif dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(num, generator=seed)
    elif real is None or real.numel() < dtype.itemsize:
        values = torch.zeros(num)
    else:
        there = real[: real.numel() // dtype.itemsize * dtype.itemsize].clone().view(dtype).to(torch.int64)
        values = torch.randint(int(there.min()), min(int(there.max()) + 1, 2**63 - 1), (num,), generator=seed)
    return values.to(dtype).view(torch.uint8)


# --- values from nodes


class Values:
    """Rebuilds captured values. Each `decode` makes new memory, shared among its values as it was in the pipeline."""

    def __init__(self, blocks: list[torch.Tensor], storages: list[int], device: torch.device, has_data: bool) -> None:
        self.blocks, self.storages, self.device, self.has_data = blocks, storages, device, has_data
        self.live: dict[tuple[int, str], Any] = {}
        self.made: dict[Any, Any] = {}
        self.to_compare = False

    def decode(self, nodes: Mapping[str, dict[str, Any]], to_compare: bool = False) -> dict[str, Any]:
        """Values by name, rebuilt together; `to_compare`: with stand-ins for what need not, or cannot, be rebuilt."""
        self.live, self.made, self.to_compare = {}, {}, to_compare
        try:
            return {name: self.value(node) for name, node in nodes.items()}
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ReplayError(f"{' and '.join(nodes)} cannot be rebuilt: {type(error).__name__}: {error}") from error

    def value(self, node: dict[str, Any]) -> Any:
        """One value."""
        inner = [] if node["kind"] == "generator" and not self.has_data else node.get("items") or []
        made = self.rebuilt(node, node["kind"], [self.value(item) for item in inner])
        if node.get("label") is not None:
            self.made[node["label"]] = made
        return made

    def rebuilt(self, node: dict[str, Any], kind: str, items: list[Any]) -> Any:
        """One value from those inside it."""
        value = node.get("value")
        if self.to_compare and (kind == "unsupported" or (kind == "same" and value not in self.made)):
            return ABSENT
        if self.to_compare and kind == "record" and "keys" in node:
            return Record(node["type_name"], dict(zip(node["keys"], items, strict=True)))
        if kind in ("record", "object", "class"):
            return rebuild(node, items)
        if kind not in KINDS:
            raise ReplayError(f"a value was not captured: {node.get('reason', kind)}")
        return KINDS[kind](self, node, value, items)

    def array(self, node: dict[str, Any], tensor: torch.Tensor) -> Any:
        """A numpy array or scalar."""
        if np is None:
            raise ReplayError("the captured values hold numpy arrays, and numpy is not installed")
        return tensor.numpy()[()] if node.get("type_name") == "scalar" else tensor.numpy()

    def generator(self, device: str, state: list[torch.Tensor]) -> torch.Generator:
        """A generator of random numbers that goes on where it was."""
        generator = torch.Generator(self.place(device))
        return generator.set_state(state[0]) if self.has_data else generator.manual_seed(SEED)

    def constant(self, type_name: str, value: Any) -> Any:
        """A dtype, device, layout, memory format or size of torch."""
        if type_name == "device":
            return self.place(value)
        found = torch.Size(value) if type_name == "Size" else getattr(torch, value)
        if type(found) not in (torch.Size, torch.dtype, torch.layout, torch.memory_format):
            raise ValueError(f"{value} is no constant of torch")
        return found

    def tensor(self, node: dict[str, Any]) -> torch.Tensor:
        """A tensor over the copy of its storage; several tensors over one storage share it."""
        device = torch.device("cpu") if self.to_compare else self.place(node["device"])
        key = (node["storage"], str(device))
        if key not in self.live:
            block = self.blocks[self.storages[node["storage"]]]
            self.live[key] = block.to(device, copy=True).untyped_storage()
        # torch would quietly enlarge a storage that is too small.
        if min([node["offset"], *node["size"], *node["stride"]]) < 0 or end_of(node) > self.live[key].nbytes():
            raise ValueError("a tensor reaches outside its storage")
        tensor = torch.empty(0, dtype=self.constant("dtype", node["dtype"]), device=device)
        tensor.set_(self.live[key], node["offset"], node["size"], node["stride"])
        return tensor.requires_grad_(bool(node.get("requires_grad")))

    def place(self, recorded: str) -> torch.device:
        """Where something goes that was on this device."""
        there = torch.device(recorded)
        return there if there.type in ("cpu", "meta") else self.device


KINDS: dict[str, Callable[[Values, dict[str, Any], Any, list[Any]], Any]] = {
    "plain": lambda values, node, value, items: value,
    "float": lambda values, node, value, items: float(value),
    "complex": lambda values, node, value, items: complex(value),
    "bytes": lambda values, node, value, items: bytes.fromhex(value),
    "ellipsis": lambda values, node, value, items: ...,
    "list": lambda values, node, value, items: items,
    "tuple": lambda values, node, value, items: tuple(items),
    "set": lambda values, node, value, items: set(items),
    "frozenset": lambda values, node, value, items: frozenset(items),
    "slice": lambda values, node, value, items: slice(*items),
    "range": lambda values, node, value, items: range(*items),
    "dict": lambda values, node, value, items: dict(zip(node.get("keys") or [], items, strict=True)),
    "same": lambda values, node, value, items: values.made[value],
    "tensor": lambda values, node, value, items: values.tensor(node["tensor"]),
    "array": lambda values, node, value, items: values.array(node, items[0]),
    "generator": lambda values, node, value, items: values.generator(value, items),
    "torch": lambda values, node, value, items: values.constant(node["type_name"], value),
}
"""How a value of each kind is made, of its node, the node's value, and the values inside it."""


def load_module(name: str) -> Any:
    """Import a module by name, or a file: the target's under the name that it had in the pipeline."""
    path = Path(name).resolve()
    if name.endswith(".py"):
        name = path.stem
    elif name == TARGET_MODULE:
        path = (Path(BASE_DIR) / str(TARGET).rpartition(":")[0]).resolve()
        path = path if path.is_file() else HERE / path.name
    else:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ReplayError(f"{name} cannot be imported: {error}") from error
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise ReplayError(f"{path} is not there; the target's file may also lie beside this script")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.path.insert(0, str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(module_name: str, name: str) -> Any:
    """What a module has under a name."""
    try:
        return functools.reduce(getattr, name.split("."), load_module(module_name))
    except AttributeError:
        raise ReplayError(f"{module_name} has no {name}") from None


def rebuild(node: dict[str, Any], items: list[Any]) -> Any:
    """A value of a listed class, or the class itself."""
    if node["type_name"] not in CLASSES:
        raise ReplayError(f"the class {node['type_name']} is unknown: it is not in this script's table CLASSES")
    module_name, name, form = CLASSES[node["type_name"]]
    kind = find(module_name, name)
    if node["kind"] == "class":
        return kind
    if node["kind"] == "record":
        is_enum = issubclass(kind, enum.Enum)
        return kind[node["value"]] if is_enum else kind(**dict(zip(node["keys"], items, strict=True)))
    state = items[0]
    if form == "attributes":
        made = kind.__new__(kind)
        vars(made).update(state)
        return made
    if form == "image":
        return find("PIL.Image", "frombytes")(state["mode"], tuple(state["size"]), state["bytes"])
    return kind(state) if form == "call" else find(*form.split(":"))(state)


# --- comparing


class Record:
    """The captured fields of a dataclass, a named tuple or a mapping; enough to compare with, whatever its class."""

    def __init__(self, type_name: str, fields: dict[str, Any]) -> None:
        self.type_name, self.fields = type_name, fields


def name_of(value: Any) -> str:
    """Qualified name of a value's class."""
    return value.type_name if isinstance(value, Record) else f"{type(value).__module__}.{type(value).__qualname__}"


def parts_of(value: Any, like: Any) -> dict[Any, Any] | None:
    """What a value holds, by key or index; None if it is to be compared as a whole."""
    if isinstance(value, Record):
        return value.fields
    inner = dict(value) if isinstance(value, Mapping) else {}
    if isinstance(like, Record):
        return {**{key: getattr(value, key, ABSENT) for key in like.fields}, **inner}
    if isinstance(value, Mapping):
        return inner
    if isinstance(value, (list, tuple, set, frozenset)):
        return dict(enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value))
    if isinstance(value, (enum.Enum, type)) or callable(getattr(value, "tobytes", None)):
        return None
    return vars(value) if hasattr(value, "__dict__") else None


def compare(expected: Any, found: Any, path: str, into: dict[str, Difference]) -> None:
    """Note where a value differs from the captured one: path -> how."""
    if expected is ABSENT:
        return
    if not isinstance(expected, torch.Tensor) and name_of(expected) != name_of(found):
        into[path] = (f"a {name_of(expected)} became a {name_of(found)}", 0.0, 0.0)
        return
    if isinstance(expected, torch.Generator):
        expected, found = expected.get_state(), found.get_state()
    elif name_of(expected).startswith("numpy."):
        expected, found = torch.from_numpy(np.array(expected)), torch.from_numpy(np.array(found))
    if isinstance(expected, torch.Tensor):
        is_tensor = isinstance(found, torch.Tensor)
        difference = compare_tensors(expected, found) if is_tensor else (f"became a {name_of(found)}", 0.0, 0.0)
        into.update({path: difference} if difference else {})
        return
    left, right = parts_of(expected, expected), parts_of(found, expected)
    if left is None or right is None:
        whole = [value.tobytes() if hasattr(value, "tobytes") else repr(value) for value in (expected, found)]
        into.update({path: (f"another {name_of(found)}", 0.0, 0.0)} if whole[0] != whole[1] else {})
    elif set(left) != set(right):
        into[path] = (f"holds {list(right)} in place of {list(left)}", 0.0, 0.0)
    else:
        for key in left:
            compare(left[key], right[key], f"{path}.{key}", into)


def compare_tensors(expected: torch.Tensor, found: torch.Tensor) -> Difference | None:
    """None when dtype, shape and every bit agree."""
    left, right = expected.detach().cpu(), found.detach().cpu()
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {list(left.shape)} became {right.dtype} {list(right.shape)}", 0.0, 0.0
    raw = [torch.empty(v.numel(), dtype=v.dtype).copy_(v.reshape(-1)).view(torch.uint8) for v in (left, right)]
    if torch.equal(*raw):
        return None
    if not (left.is_floating_point() or left.is_complex()):
        return f"{int((left != right).sum())} of {left.numel()} values differ", 0.0, 0.0
    left, right = (v.to(torch.complex128 if v.is_complex() else torch.float64) for v in (left, right))
    is_finite = left.isfinite() & right.isfinite()
    num_odd = int((~is_finite & (left != right) & ~(left.isnan() & right.isnan())).sum())
    error = float(torch.where(is_finite, (left - right).abs(), 0.0).max())
    relative = error / (float(torch.where(left.isfinite(), left.abs(), 0.0).max()) or 1.0)
    reason = f"{num_odd} values are NaN or infinite on one side only" if num_odd else f"largest error {error:.3g}"
    return reason, error, relative
