"""Replay a captured stage with torch alone: the calls that a pipeline made of it, with the same inputs and state.

Run it beside `manifest.json` and `tensors.safetensors`:  python replay.py [--help]
Nothing is unpickled, and no class is made that the table CLASSES below does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
CLASSES: dict[str, tuple[Any, ...]] = {}  # qualified name: (module, name, how it is rebuilt)
# [end]

HERE = Path(__file__).resolve().parent
TENSORS = "tensors.safetensors"
WARMUPS = 3
ABSENT = object()
Difference = tuple[str, float, float]  # reason, largest error, the same relative to the largest value
SDPA = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
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
        header = json.loads(file.read(start - 8))
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[start:]
    spans = [header[f"storage.{index}"]["data_offsets"] for index in range(manifest["num_storages"])]
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
    if form == "from_dict":
        return kind.from_dict(state)
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
    if callable(getattr(value, "to_dict", None)):
        return dict(value.to_dict())
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


# --- the stage


def build(factory: Any, arguments: dict[str, Any], device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Call the factory; tells as well what is left to be done with `.to()`."""
    names = inspect.signature(factory).parameters
    given = {"device": str(device), **({"dtype": DTYPE} if DTYPE else {})}
    left = {"device": device, **({"dtype": getattr(torch, DTYPE)} if DTYPE else {})}
    random.seed(SEED)
    torch.manual_seed(SEED)
    if np is not None:
        np.random.seed(SEED % 2**32)
    made = factory(**{**{name: value for name, value in given.items() if name in names}, **arguments})
    return made, {name: value for name, value in left.items() if name not in names}


def load_stage(factory: str | None, device: torch.device) -> tuple[Any, Any]:
    """The stage's owner, and what is called: the owner itself, or a method of it."""
    sys.path[:0] = [BASE_DIR, str(Path.cwd())]
    module_name, _, name = (factory or TARGET or "").rpartition(":")
    if not module_name:
        raise ReplayError("give --factory module:factory, which returns the stage: the pipeline has none of its own")
    function = find(module_name if factory else TARGET_MODULE or module_name, name)
    target, wanted = build(function, {} if factory else TARGET_ARGS, device)
    for part in [target, *getattr(target, "__dict__", {}).values()] if ATTENTION and ATTENTION not in SDPA else []:
        if hasattr(part, "set_attention_backend"):
            part.set_attention_backend(ATTENTION)
    owner = target if factory else follow(target, STAGE)[0]
    # Only the stage goes to the device; the rest of the pipeline is not needed.
    if wanted and callable(getattr(type(owner), "to", None)):
        moved = owner.to(**wanted)
        if owner is target and moved is not None:
            target = owner = moved
    if not factory:
        return follow(compiled(target), STAGE)
    name = STAGE.rpartition(".")[2]
    return owner, getattr(owner, name) if name and inspect.isroutine(getattr(type(owner), name, None)) else owner


def step(value: Any, part: str) -> Any:
    """One part of a dotted path: a key, an index or an attribute."""
    if isinstance(value, dict) and part in value:
        return value[part]
    if part.isdigit() and isinstance(value, (list, tuple)):
        return value[int(part)] if int(part) < len(value) else ABSENT
    return getattr(value, part, ABSENT)


def follow(target: Any, path: str) -> tuple[Any, Any]:
    """The owner of what is at a path, and what is called there."""
    owner, found = target, target
    for part in path.split(".") if path else []:
        owner, found = found, step(found, part)
        if found is ABSENT and part in ("prefill", "decode") and isinstance(owner, nn.Module):
            return owner, owner  # a phase of text generation: calls of the model itself
        if found is ABSENT:
            raise ReplayError(f"the stage {path!r} is not there: a {type(owner).__name__} has no {part!r}")
    is_method = inspect.isroutine(found) or isinstance(found, (type, functools.partial))
    return (owner if is_method else found), found


def compiled(target: Any) -> Any:
    """The target with those modules compiled that were in the pipeline."""
    is_module = isinstance(target, nn.Module)
    names = [""] if is_module else [name for name, value in vars(target).items() if isinstance(value, nn.Module)]
    options = COMPILE or {"only": [], "mode": None}
    for path in options["only"] or (names if COMPILE else []):
        wrapper = torch.compile(follow(target, path)[1], mode=options["mode"])
        owner, _, name = path.rpartition(".")
        if path:
            setattr(follow(target, owner)[1], name, wrapper)
        else:
            target = wrapper
    return target


# --- what surrounds a call


def settings_table() -> dict[str, tuple[Any, Any]]:
    """How to read and set what changes which kernels run."""
    cuda = torch.backends.cuda
    table: dict[str, tuple[Any, Any]] = {
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
    }
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        table[f"cuda.{name}"] = (getattr(cuda, f"{name}_enabled"), getattr(cuda, f"enable_{name}"))
    reduced = [f"cuda.matmul.allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    for path in (*(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")), *reduced):
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, torch.backends)
        table[path] = (functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))
    return table


@contextlib.contextmanager
def modes(context: dict[str, Any], device: torch.device) -> Iterator[None]:
    """The modes and settings of torch that a call had."""
    with contextlib.ExitStack() as stack:
        # In this order: entering inference_mode(False) would switch gradients on.
        stack.enter_context(torch.inference_mode(context["inference_mode"]))
        stack.enter_context(torch.set_grad_enabled(context["grad_enabled"]))
        if ATTENTION in SDPA:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel([getattr(SDPBackend, SDPA[ATTENTION])]))
        if context["autocast_dtype"]:
            stack.enter_context(torch.autocast(device.type, dtype=getattr(torch, context["autocast_dtype"])))
        table = settings_table()
        for name, value in context.get("settings", {}).items():
            with contextlib.suppress(RuntimeError):  # torch tells some settings of the old kind no more
                if name in table and table[name][0]() != value:
                    table[name][1](value)
        yield


def restore_rng(values: Values, nodes: Mapping[str, dict[str, Any]]) -> None:
    """Put the generators of torch, Python and numpy where they were."""
    states = values.decode({name: node for name, node in nodes.items() if name in ("cpu", "device")})
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "device" in states and values.device.type != "cpu":
        torch.get_device_module(values.device).set_rng_state(states["device"], values.device)
    if "python" in nodes:
        version, numbers, gauss = nodes["python"]["items"]
        words = values.decode({"python": numbers["items"][0]})["python"].tolist()
        random.setstate((version["value"], tuple(words), gauss.get("value")))
    if "numpy" in nodes and np is not None:
        np.random.set_state(tuple(values.decode({"numpy": nodes["numpy"]})["numpy"]))


# --- replaying


class Replay:
    """The stage with a capture: restores what surrounds each call, and makes the call."""

    def __init__(self, owner: Any, function: Any, values: Values, manifest: dict[str, Any]) -> None:
        self.owner, self.function, self.values = owner, function, values
        self.first_state: dict[str, Any] = manifest.get("owner_state", {})
        self.moving: set[str] = set()
        self.is_first = True

    def state(self, call: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The stage's state before a call, as far as it was stored."""
        state = {**self.first_state, **call.get("owner_state", {})}
        state = {name: node for name, node in state.items() if all(map(is_known, below(node)))}
        made = labels(*call["inputs"].values(), *state.values(), made=True)
        return {name: node for name, node in state.items() if labels(node) <= made}

    def place(self, path: str) -> tuple[Any, str]:
        """Whose attribute a part of the state is; None where there is no such module here."""
        if not isinstance(self.owner, nn.Module):
            return self.owner, path
        module, _, name = path.rpartition(".")
        with contextlib.suppress(AttributeError):
            return self.owner.get_submodule(module), name
        return None, name

    def write(self, path: str, value: Any) -> None:
        """Put a part of the state back; tensors of the same form in place, so that whoever else holds them agrees."""
        owner, name = self.place(path)
        now = getattr(owner, name, None)
        if isinstance(owner, nn.Module) and isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            forms = [(type(v), v.shape, v.dtype, v.device, v.stride()) for v in (now, value)]
            with contextlib.suppress(RuntimeError), torch.no_grad():  # a tensor of inference mode refuses
                if forms[0] == forms[1]:
                    now.copy_(value)
                    return
        if isinstance(owner, nn.Module) and name not in vars(owner) and isinstance(value, torch.Tensor | None):
            setattr(owner, name, value)  # a buffer
        elif hasattr(owner, "__dict__"):
            vars(owner)[name] = value

    def note_moving(self, state: dict[str, dict[str, Any]]) -> None:
        """Remember which parts of the state are not as captured; they are put back before each call from now on."""
        self.is_first = False
        for name, node in state.items():
            now, found = getattr(*self.place(name), ABSENT), dict[str, Difference]()
            if self.values.has_data or not any(tensors_in(node)):
                compare(self.values.decode({name: node}, to_compare=True)[name], now, name, found)
            if found or now is None or now is ABSENT:
                self.moving.add(name)

    def prepare(self, call: dict[str, Any]) -> tuple[Any, Any]:
        """The inputs in new memory; state and generators as they were. Not part of the timed part."""
        state = self.state(call)
        if self.is_first:
            self.note_moving(state)
        # What is one object with a part of an input, or of what is put back, is rebuilt together with it.
        wanted = {f"state.{name}": node for name, node in state.items() if name in self.moving}
        rest = {f"state.{name}": node for name, node in state.items() if name not in self.moving}
        while more := {
            name: node
            for name, node in rest.items()
            if name not in wanted and labels(node) & labels(*call["inputs"].values(), *wanted.values())
        }:
            wanted |= more
        made = self.values.decode({**call["inputs"], **wanted})
        for name in wanted:
            self.write(name.removeprefix("state."), made[name])
        if self.values.has_data:
            restore_rng(self.values, call["rng"])
        synchronize(self.values.device)
        return made["args"], made["kwargs"]

    def once(self, call: dict[str, Any]) -> dict[str, Any]:
        """Make the call untimed; returns what came of it, by the captured name."""
        args, kwargs = self.prepare(call)
        with modes(call["context"], self.values.device):
            made = {"output": self.function(*args, **kwargs), "args": args, "kwargs": kwargs}
            synchronize(self.values.device)
        self.note_moving(self.state(call))
        return made

    def differences(self, call: dict[str, Any], made: dict[str, Any]) -> dict[str, Difference]:
        """How the output, the changed inputs and the changed state differ from the pipeline's, by path."""
        found: dict[str, Difference] = {}
        expected = {"output": call["output"], **call.get("inputs_after", {})}
        for name, value in self.values.decode(expected, to_compare=True).items():
            compare(value, made[name], name, found)
        for name, node in call.get("state_after", {}).items():
            value = self.values.decode({name: node}, to_compare=True)[name]
            compare(value, getattr(*self.place(name), ABSENT), f"state.{name}", found)
        return found

    def time_ms(self, call: dict[str, Any]) -> float:
        """Time the call once, by device events where there is a device."""
        args, kwargs = self.prepare(call)
        device = self.values.device
        with modes(call["context"], device):
            if device.type == "cpu":
                start = time.perf_counter()
                self.function(*args, **kwargs)
                return (time.perf_counter() - start) * 1e3
            begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            begin.record()
            self.function(*args, **kwargs)
            end.record()
            synchronize(device)
            return float(begin.elapsed_time(end))


def is_known(node: dict[str, Any]) -> bool:
    """Whether a value was stored, and its class may be made."""
    return node["kind"] not in ("record", "object", "class", "unsupported") or node.get("type_name") in CLASSES


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(replay: Replay, call: dict[str, Any], repeats: int, has_parity: bool) -> dict[str, Any]:
    """Compare one call with the pipeline's, and time it."""
    made = replay.once(call)
    found = replay.differences(call, made) if has_parity else {}
    del made
    for _ in range(WARMUPS):
        replay.time_ms(call)
    samples = [replay.time_ms(call) for _ in range(max(1, repeats))]
    pipeline = statistics.median(call["in_pipeline_ms"]) if call.get("in_pipeline_ms") else None
    return {
        "call": call["index"],
        "run": call.get("run", 0),
        "in_pipeline_median_ms": pipeline,
        "replayed_median_ms": statistics.median(samples),
        "replayed_min_ms": min(samples),
        "ratio": statistics.median(samples) / pipeline if pipeline else None,
        "parity": ("different" if found else "exact") if has_parity else None,
        "max_abs_error": max((error for _, error, _ in found.values()), default=0.0) if has_parity else None,
        "max_rel_error": max((error for _, _, error in found.values()), default=0.0) if has_parity else None,
        "differences": {path: reason for path, (reason, _, _) in found.items()},
        "samples_ms": samples,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load the stage and replay the chosen calls."""
    manifest = read_manifest()
    there = [call["index"] for call in manifest["calls"]]
    if missing := set(options.calls or []) - set(there):
        raise ReplayError(f"--calls: there is no call {min(missing)}; captured are {', '.join(map(str, there))}")
    calls = [call for call in manifest["calls"] if options.calls is None or call["index"] in options.calls]
    has_data = not options.synthetic or (HERE / TENSORS).is_file()
    blocks = read_blocks(manifest) if has_data else None
    if options.synthetic:
        blocks = synthetic_blocks(manifest, blocks)
    device = torch.device(options.device or DEVICE)
    owner, function = load_stage(options.factory, device)
    if not options.factory and name_of(owner) != manifest["owner_type"]:
        raise ReplayError(f"the stage {STAGE!r} is a {name_of(owner)} here, and was a {manifest['owner_type']}")
    replay = Replay(owner, function, Values(blocks or [], manifest["storages"], device, has_data), manifest)
    data = "SYNTHETIC" if options.synthetic else "REDACTED" if manifest.get("is_redacted") else "captured"
    results = [measure(replay, call, options.repeats, data == "captured") for call in calls]
    if options.profile:
        kinds = {getattr(torch.profiler.ProfilerActivity, name.upper()) for name in {"cpu", device.type}}
        args, kwargs = replay.prepare(calls[0])
        with modes(calls[0]["context"], device), torch.profiler.profile(activities=kinds) as profiler:
            function(*args, **kwargs)
            synchronize(device)
        profiler.export_chrome_trace(options.profile)
    return {"stage": STAGE, "device": str(device), "torch": torch.__version__, "data": data, "calls": results}


def table(report: dict[str, Any]) -> str:
    """The results for people."""
    what = "" if report["data"] == "captured" else f", {report['data']} data"
    lines = [f"{report['stage'] or 'the target'} on {report['device']}, torch {report['torch']}{what}; times in ms"]
    lines += [f"{'call':>6} {'pipeline':>10} {'replayed':>10} {'min':>10} {'ratio':>7}  parity"]
    for call in report["calls"]:
        times = [call[name] for name in ("in_pipeline_median_ms", "replayed_median_ms", "replayed_min_ms")]
        cells = " ".join(f"{'-' if time is None else format(time, '.4g'):>10}" for time in times)
        ratio = "-" if call["ratio"] is None else f"{call['ratio']:.3f}"
        error = f" (largest error {call['max_abs_error']:.3g}, relative {call['max_rel_error']:.3g})"
        parity = f"{call['parity'] or 'none'}{error if call['parity'] == 'different' else ''}"
        lines.append(f"{call['call']:>6} {cells} {ratio:>7}  {parity}")
        lines += [f"{'':>8}{path}: {reason}" for path, reason in list(call["differences"].items())[:5]]
    return "\n".join(lines)


def main() -> int:
    """Run the command line; 2 where the capture or the options are wrong."""
    parser = argparse.ArgumentParser(description=f"Replay the captured calls of {STAGE or 'the target'}.")
    parser.add_argument("--repeats", type=int, default=10, help="timed repeats of each call")
    parser.add_argument(
        "--calls",
        type=lambda text: [int(number) for number in text.split(",")],
        help="indices, such as 0,2; by default all captured ones",
    )
    parser.add_argument("--device", help=f"by default {DEVICE}")
    parser.add_argument("--factory", help="module:factory or file.py:factory that returns the stage alone")
    parser.add_argument("--synthetic", action="store_true", help="random inputs; works without the tensors' file")
    parser.add_argument("--profile", metavar="FILE", help="write a trace of one replay of the first call")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    try:
        # What the stage prints must not get into the report.
        with contextlib.redirect_stdout(sys.stderr):
            report = run(options)
    except ReplayError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if options.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
