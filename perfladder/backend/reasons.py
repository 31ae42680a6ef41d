"""Why an export or a build failed, in the few groups that such failures fall into, each with what to try next."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from perfladder.errors import PerfladderError
from perfladder.text import clause

_SHOWN: Final = 300

_MEMORY: Final = ("out of memory", "bad_alloc", "cannot allocate memory", "can't allocate memory", "failed to allocate")
_LIBRARY: Final = ("No module named", "is not installed", "cannot open shared object file", "CppCompileError")
_DATA: Final = (
    "GuardOnDataDependentSymNode",
    "data-dependent",
    "Data-dependent",
    "Dynamic control flow",
    "control flow",
    "Could not extract specialized integer",
)
_SHAPES: Final = ("Constraints violated", "ConstraintViolation", "Specializations unexpectedly required")
_OPERATOR: Final = (
    "No ONNX function found",
    "UnsupportedOperator",
    "Exporting the operator",
    "Could not find an implementation",
    "NOT_IMPLEMENTED",
    "No Op registered for",
    "MissingOperator",
    "is not supported in Inductor",
)


_UNSUPPORTED: Final = (
    "unsupported operator: {}. Next: tune the modules around it instead, try another opset_version or exporter, or use "
    "a backend of torch's own (inductor_jit, inductor_aot)."
)
_TOO_LARGE: Final = (
    "out of memory: {}. Next: narrow the ranges in `dynamic_shapes`, tune at smaller batch sizes, or free memory first."
)
_PARSER_KINDS: Final = {
    "operator": _UNSUPPORTED,
    "memory": _TOO_LARGE,
    "model": "refused model: {}. Next: try another opset_version or exporter.",
}


def explain_export_failure(error: BaseException) -> str:
    """Say what kind of failure an exporter's or a compiler's error is, and the next thing to try.

    Args:
        error: What was raised; errors that caused it are looked at too.

    Returns:
        The kind, what the library says of it in one line, and what to do. An error of perfladder's own keeps its words.
    """
    if isinstance(error, PerfladderError):
        return str(error)
    chain = list(_chain(error))
    text = "\n".join(f"{type(one).__name__}: {one}" for one in chain)
    for phrases, kinds, explain in _GROUPS:
        if any(isinstance(one, kinds) for one in chain) or any(phrase in text for phrase in phrases):
            return explain(text)
    return f"{type(error).__name__}: {_first_line(str(error))}"


class ParserFault(NamedTuple):
    """One thing that the parser of a library cannot take of an ONNX model."""

    code: str
    operator: str
    node: str
    message: str


def explain_parser_faults(faults: Sequence[ParserFault]) -> str:
    """Say all that a parser refused, by kind, each kind with the next thing to try."""
    by_kind: dict[str, list[ParserFault]] = {}
    for fault in faults:
        by_kind.setdefault(_kind_of(fault), []).append(fault)
    told = []
    for kind, some in by_kind.items():
        listed = "; ".join(dict.fromkeys(f"{one.operator or one.code} ({one.node}): {_tidy(one)}" for one in some))
        told.append(_PARSER_KINDS[kind].format(listed))
    return " ".join(told)


def _kind_of(fault: ParserFault) -> str:
    if fault.code == "MEM_ALLOC_FAILED":
        return "memory"
    is_missing = "plugin" in fault.message.lower() or fault.code == "UNSUPPORTED_NODE"
    return "operator" if is_missing or fault.code.startswith("UNSUPPORTED_NODE_") else "model"


def _tidy(fault: ParserFault) -> str:
    # Some checks tell nothing but that they failed.
    return "not supported" if fault.message in ("false", "") else _first_line(fault.message)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _memory(text: str) -> str:
    return _TOO_LARGE.format(_line_with(text, _MEMORY))


def _library(text: str) -> str:
    name = re.search(r"No module named '?([\w.]+)'?", text)
    told = f"the library {name[1].partition('.')[0]}" if name else _line_with(text, _LIBRARY)
    remedy = f"pip install {name[1].partition('.')[0]}" if name else "install it, or repair its installation"
    return f"missing library: {told}. Next: {remedy}."


def _data_dependent(text: str) -> str:
    where = re.search(r"The following call raised this error:\s*File \"([^\"]+)\", line (\d+)[^\n]*\n\s*([^\n]+)", text)
    told = f"`{where[3].strip()}` ({where[1].rpartition('/')[2]}:{where[2]})" if where else _line_with(text, _DATA)
    return (
        f"data-dependent control flow: the code branches on the values of tensors, at {told}. Next: use torch.where or "
        "torch.cond there, tune the modules inside this one instead, or use inductor_jit, which breaks its graph there."
    )


def _shapes(text: str) -> str:
    fixed = re.findall(r"marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", text)
    solved = re.findall(r"generated for (\w+) = .*? resulted in a specialized value of (\d+)", text)
    fixes = text.partition("Suggested fixes:")[2]
    ranges = re.findall(r"^\s+(?!_)(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", fixes, flags=re.MULTILINE)
    multiples = re.findall(r"^\s+(\w+) = (\d+)\*_\w+$", fixes, flags=re.MULTILINE)
    facts = [f"the code works with {name} = {size} only" for name, size in dict.fromkeys([*fixed, *solved])]
    facts += [f"the code takes {name} from {least or 0} to {most or 'any size'} only" for name, least, most in ranges]
    facts += [f"the code takes multiples of {times} as {name} only" for name, times in multiples]
    told = _label("; ".join(dict.fromkeys(facts))) or _line_with(text, _SHAPES)
    return (
        f"shape constraint: {told}. Next: state sizes in `dynamic_shapes` that the code takes, or a plain number for "
        "one that never changes; or change the code so that it takes every size of the range."
    )


def _operator(text: str) -> str:
    found = re.search(r"(?:op='|operator '|implementation for |Unsupported[^']*')([\w:.]+(?:\(\d+\))?)", text)
    told = found[1] if found else _line_with(text, _OPERATOR)
    return _UNSUPPORTED.format(told)


def _label(text: str) -> str:
    """Names of dimensions as the user knows them."""
    return re.sub(r"\b_?dim_(\w+)", r"\1", text)


def _line_with(text: str, phrases: tuple[str, ...]) -> str:
    lines = text.splitlines()
    return _first_line(next((line for line in lines if any(phrase in line for phrase in phrases)), lines[0]))


def _first_line(text: str) -> str:
    # Exporters colour their messages for terminals.
    line = re.sub(r"\x1b\[\d+m", "", next((line for line in text.splitlines() if line.strip()), "no message")).strip()
    line = line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."
    return clause(line)


_Group = tuple[tuple[str, ...], tuple[type[BaseException], ...], Callable[[str], str]]
_GROUPS: Final[tuple[_Group, ...]] = (
    (_MEMORY, (MemoryError,), _memory),
    (_DATA, (), _data_dependent),
    (_SHAPES, (), _shapes),
    (_OPERATOR, (), _operator),
    (_LIBRARY, (ImportError,), _library),
)
"""The first one that fits counts: exporters wrap what went wrong in errors of other groups."""
