"""Names of kernels: as the profiler of torch writes them, and as ncu filters by them."""

from __future__ import annotations

import re
from typing import Final

_ANONYMOUS: Final = re.compile(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}")
_CAST: Final = re.compile(r"\((?:unsigned |signed )?(?:bool|char|short|int|long|long long)\)(?=[-\d])")
_LAMBDA: Final = re.compile(r"\{lambda\([^{}]*\)#\d+\}|\[lambda\([^\[\]]*\) \(instance \d+\)\]")


def function_name(kernel: str) -> str:
    """The function's own name, which is ncu's name base `function`.

    `void at::native::elementwise_kernel<128, 4>(int, float*)` is `elementwise_kernel`; a plain name is itself.
    """
    text = _ANONYMOUS.sub("anonymous", kernel)
    head = _until_arguments(text)
    without_template = _without_template(head)
    return without_template.rpartition("::")[2].strip() or kernel


def _until_arguments(text: str) -> str:
    """Up to the parenthesis that opens the arguments: the first one outside of angle brackets."""
    depth = 0
    for index, char in enumerate(text):
        if char == "<":
            depth += 1
        elif char == ">" and text[index - 1] != "-":
            depth -= 1
        elif char == "(" and depth == 0 and index > 0:
            return text[:index]
    return text


def _without_template(head: str) -> str:
    """Without the template's arguments, and without the return type before the name."""
    kept, depth = [], 0
    for char in head:
        if char == "<":
            depth += 1
        elif char == ">":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(char)
    return "".join(kept).strip().rpartition(" ")[2]


def is_same_kernel(asked: str, reported: str) -> bool | None:
    """Whether two demangled names are of one instantiation; None where the spelling differs too much to tell.

    The profiler of torch and ncu demangle differently: ncu writes the type of numbers and another form of lambdas.
    """
    if function_name(asked) != function_name(reported):
        return False
    if asked == function_name(asked) or _plain(asked) == _plain(reported):
        return True
    return None


def _plain(name: str) -> str:
    text = _ANONYMOUS.sub("anonymous", name)
    return re.sub(r"\s", "", _LAMBDA.sub("lambda", _CAST.sub("", text)))
