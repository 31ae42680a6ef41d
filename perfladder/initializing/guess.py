"""Inputs for a call that nobody has described: by its parameters' names and types, and by the weights they meet."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from pydantic import JsonValue

from perfladder.models import Model
from perfladder.object_parts import named_modules_of
from perfladder.sites import generates

_TEXT = "a lighthouse at dusk"
_TEXT_NAMES = {"prompt", "text", "texts", "caption", "query", "question", "sentence", "sentences", "instruction"}
_ID_NAMES = {"input_ids", "ids", "tokens", "token_ids", "decoder_input_ids"}
_STEP_NAMES = {"t", "timestep", "timesteps", "sigma", "time", "time_step"}
_CALLS = ("generate", "forward", "stream", "run", "predict", "sample", "infer", "inference", "encode", "process")
_SMALL = {"num_inference_steps": 4, "max_new_tokens": 16}
"""Options whose defaults make one call long; the file says what they are by default."""
_NUM_TOKENS, _SIDE = 16, 64
_MAX_TRIALS = 24


class ParameterInfo(Model):
    """One parameter of the call."""

    name: str
    annotation: str
    default: str | None
    is_required: bool


def find_call(obj: Any) -> str | None:
    """What to call on an object: itself where it can be called, else its method with the most telling name.

    Raises:
        LookupError: It has no such method; the message lists what it has.
    """
    if generates(obj):
        return "generate"
    if callable(obj):
        return None
    own = [name for name in dir(type(obj)) if not name.startswith("_") and inspect.isroutine(getattr(obj, name, None))]
    for name in _CALLS:
        if name in own:
            return name
    if len(own) == 1:
        return own[0]
    raise LookupError(f"methods: {', '.join(own[:20]) or 'none'}")


def parameters_of(function: Callable[..., Any]) -> list[ParameterInfo]:
    """The parameters that a call takes by name."""
    from torch import nn

    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        ParameterInfo(
            name=name,
            annotation="" if found.annotation is found.empty else inspect.formatannotation(found.annotation),
            default=None if found.default is found.empty else repr(found.default)[:80],
            is_required=found.default is found.empty,
        )
        for name, found in signature.parameters.items()
        if found.kind in kinds
    ]


def guesses(
    obj: Any, parameters: list[ParameterInfo], annotations: Mapping[str, Any], given: Mapping[str, JsonValue]
) -> Iterator[dict[str, JsonValue]]:
    """Sets of inputs to try, the most likely first.

    Args:
        obj: What is called, or the call's owner.
        parameters: Of the call.
        annotations: Their types, where the code names any.
        given: Inputs that the user has given; they are in every set.
    """
    names = {parameter.name for parameter in parameters}
    wanted = [parameter.name for parameter in parameters if parameter.is_required and parameter.name not in given]
    if not wanted and not given:
        wanted = _usual_first(obj, names)
    # `generate` takes it although its signature does not name it.
    known = {*names, "max_new_tokens"} if generates(obj) else names - {"max_new_tokens"}
    small = {name: value for name, value in _SMALL.items() if name in known}
    choices = [list(_values(obj, name, annotations.get(name))) for name in wanted]
    for values in itertools.islice(itertools.product(*choices), _MAX_TRIALS):
        yield {**dict(zip(wanted, values, strict=True)), **small, **given}


def _usual_first(obj: Any, names: set[str]) -> list[str]:
    """What a call is given in practice although its signature asks for nothing."""
    if generates(obj):
        return ["inputs"]
    for name in (*_TEXT_NAMES & names, "input_ids", "pixel_values", "hidden_states", "input_features"):
        if name in names:
            return [name]
    return []


def _values(obj: Any, name: str, annotation: Any) -> Iterator[JsonValue]:
    kinds = {annotation, *get_args(annotation)}
    if name in _ID_NAMES or (name == "inputs" and generates(obj)):
        yield _ids()
        return
    if name in _TEXT_NAMES or str in kinds:
        yield _TEXT
        return
    for kind, value in ((bool, False), (int, 4), (float, 1.0)):
        if kind in kinds and name not in _STEP_NAMES:
            yield value
            return
    if name in _STEP_NAMES:
        yield {"$tensor": [1], "fill": "ones"}
        yield 1
        return
    yield from _tensors(obj, name)


def _ids() -> dict[str, JsonValue]:
    return {"$tensor": [1, _NUM_TOKENS], "dtype": "int64", "fill": "zeros"}


def _tensors(obj: Any, name: str) -> Iterator[JsonValue]:
    """Tensors of the shapes that the first layers with weights take."""
    config = getattr(obj, "config", None)
    context = getattr(config, "cross_attention_dim", None)
    if "encoder_hidden_states" in name and isinstance(context, int):
        yield {"$tensor": [1, 8, context]}
    seen: list[JsonValue] = []
    for layer in itertools.islice(_layers(obj), 4):
        for value in _shapes_for(layer):
            if value not in seen:
                seen.append(value)
                yield value
    if not seen:
        yield {"$tensor": [1, _SIDE]}


def _layers(obj: Any) -> Iterator[Any]:
    for _, module in named_modules_of(obj):
        yield from (layer for layer in module.modules() if hasattr(layer, "weight"))


def _shapes_for(layer: Any) -> Iterator[JsonValue]:
    from torch import nn

    dtype = str(layer.weight.dtype).removeprefix("torch.") if layer.weight is not None else "float32"
    shapes: list[list[int]] = []
    if isinstance(layer, nn.Embedding):
        yield _ids()
    elif isinstance(layer, nn.Linear):
        shapes = [[1, layer.in_features], [1, _NUM_TOKENS, layer.in_features]]
    elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        shapes = [[1, layer.in_channels, *[_SIDE if layer.weight.dim() < 5 else 16] * (layer.weight.dim() - 2)]]
    elif isinstance(layer, nn.LayerNorm):
        shapes = [[1, _NUM_TOKENS, *layer.normalized_shape]]
    for shape in shapes:
        yield {"$tensor": list(shape), **({} if dtype == "float32" else {"dtype": dtype})}
