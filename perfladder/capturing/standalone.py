"""Replay a captured stage with torch alone: the calls that a pipeline made of it, with the same inputs and state.

Run it beside `manifest.json` and `tensors.safetensors`:  python replay.py [--help]
Nothing is unpickled, and no class is made that the table CLASSES below does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import random
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perfladder.capturing.standalone_timing import time_ms
from perfladder.capturing.standalone_values import (
    ABSENT,
    ATTENTION,
    BASE_DIR,
    CLASSES,
    COMPILE,
    DEVICE,
    DTYPE,
    HERE,
    NVTX_RANGE,
    SEED,
    STAGE,
    TARGET,
    TARGET_ARGS,
    TARGET_MODULE,
    TENSORS,
    Difference,
    ReplayError,
    Values,
    below,
    compare,
    find,
    labels,
    name_of,
    np,
    read_blocks,
    read_manifest,
    synthetic_blocks,
    tensors_in,
)

# [code]
WARMUPS = 3
SDPA = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


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
        self.known: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
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
        self.is_first, self.known = False, {}
        for name, node in state.items():
            now, found = getattr(*self.place(name), ABSENT), dict[str, Difference]()
            if self.values.has_data or not any(tensors_in(node)):
                compare(self.values.decode({name: node}, to_compare=True)[name], now, name, found)
                is_moving = bool(found)
            else:
                is_moving = now is None or now is ABSENT
            self.moving |= {name} if is_moving else set()

    def to_restore(self, call: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The parts of the state that are put back before a call."""
        if self.is_first:
            self.note_moving(self.state(call))
        key = (call.get("run", 0), call["index"])
        if key not in self.known:
            state = self.state(call)
            met = {name: found for name, node in state.items() if (found := labels(node))}
            chosen, shared = self.moving & set(state), labels(*call["inputs"].values())
            # What is one object with a part of an input, or of what is put back, is rebuilt together with it.
            while more := {name for name in met if met[name] & shared or name in chosen}:
                chosen |= more
                shared = shared.union(*(met.pop(name) for name in more))
            self.known[key] = {f"state.{name}": node for name, node in state.items() if name in chosen}
        return self.known[key]

    def prepare(self, call: dict[str, Any]) -> tuple[Any, Any]:
        """The inputs in new memory; state and generators as they were. Not part of the timed part."""
        wanted = self.to_restore(call)
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
        """Time the call once, with the host as far ahead of the device as in the pipeline."""
        args, kwargs = self.prepare(call)
        lead_ms = statistics.median(call.get("host_lead_ms") or [0.0])
        with modes(call["context"], self.values.device):
            return time_ms(lambda: self.function(*args, **kwargs), self.values.device, lead_ms)


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


def mark(replay: Replay, call: dict[str, Any]) -> None:
    """Warm up, then make the call once inside an NVTX range, for a profiler that looks at that alone."""
    if replay.values.device.type != "cuda":
        raise ReplayError(f"--nvtx: ranges are for NVIDIA GPUs, and the device is {replay.values.device}")
    for _ in range(WARMUPS):
        replay.once(call)
    args, kwargs = replay.prepare(call)
    with modes(call["context"], replay.values.device):
        torch.cuda.nvtx.range_push(NVTX_RANGE)
        replay.function(*args, **kwargs)
        synchronize(replay.values.device)
        torch.cuda.nvtx.range_pop()


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
    if options.nvtx:
        mark(replay, calls[0])
        calls = []
    data = "SYNTHETIC" if options.synthetic else "REDACTED" if manifest.get("is_redacted") else "captured"
    results = [measure(replay, call, options.repeats, data == "captured") for call in calls]
    if options.profile and calls:
        kinds = {getattr(torch.profiler.ProfilerActivity, name.upper()) for name in {"cpu", device.type}}
        args, kwargs = replay.prepare(calls[0])
        with warnings.catch_warnings():  # torch tells how it keeps events of several cycles; here is one
            warnings.simplefilter("ignore")
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
    parser.add_argument("--nvtx", action="store_true", help="only mark one replay of the first call, and time nothing")
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
