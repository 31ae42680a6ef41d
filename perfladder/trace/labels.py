"""Names of our own spans in a trace: printable ASCII, reversible, recognised by their prefix and never by category.

torch writes span names into its JSON without escaping them all: a quote in a `record_function` name makes the file
invalid, and newlines, tabs and non-ASCII characters come back changed. So a label holds only characters that no writer
touches.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

PREFIX: Final = "perfladder."
RUN_KIND: Final = "profiled_run"
"""Kind of the span around one run of the workload; its name is the run's index."""
WARMUP_KIND: Final = "warmup_run"
"""Kind of the span around a warm-up inside the window, or the preparation of a run: nothing in it is counted anywhere
or warned about."""
FUNCTION_KIND: Final = "function"
"""Kind of the span around one call of a `torch.nn.functional` function; the kernel table names it beside the module."""
LAUNCH_KIND: Final = "launch_site"
"""Kind of the span around one launch of a Triton kernel by the program; its name is the line that launches it."""
MARK_KIND: Final = "marked_stage"
"""Kind of the span around one call of a stage that user code marks with `perfladder.stage`."""
STEP_KIND: Final = "profiler_step"
"""Kind of a step of `torch.profiler.profile.step()`: a run, in a trace that holds no label of ours."""
ANNOTATION_KIND: Final = "annotation"
"""Kind of any other `record_function` span: a region, in a trace that holds no label of ours."""
GC_KIND: Final = "garbage_collection"
"""Kind of the span around one pass of Python's garbage collector; its name is the generation."""

# Letters, digits and `_.-~` are always kept by urllib; these are kept too. A percent sign is escaped, which makes the
# encoding reversible.
_SAFE_PUNCTUATION: Final = "/()[]+=@*,:"
_KIND: Final = re.compile(r"[a-z][a-z0-9_]*")
_LABEL: Final = re.compile(re.escape(PREFIX) + r"([a-z][a-z0-9_]*):([\x21-\x7e]*)")
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Label(NamedTuple):
    """What one of our spans stands for: a kind such as `untuned_module` and a name such as `unet.down_blocks.0`."""

    kind: str
    name: str

    @property
    def region_id(self) -> str:
        """The label without the prefix and without escapes, e.g. `untuned_module:unet`."""
        return f"{self.kind}:{self.name}"


def encode_label(kind: str, name: str) -> str:
    """Return the span name for a label, e.g. `perfladder.untuned_module:unet.down_blocks.0`.

    Args:
        kind: Lower-case identifier, e.g. `untuned_module`.
        name: Any text; characters outside a safe set are percent-escaped as UTF-8.

    Raises:
        ValueError: `kind` is no lower-case identifier.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"A label kind is a lower-case identifier such as 'untuned_module', not {kind!r}.")
    escaped = quote_from_bytes(name.encode("utf-8", "surrogatepass"), safe=_SAFE_PUNCTUATION)
    return f"{PREFIX}{kind}:{escaped}"


def decode_label(text: str) -> Label | None:
    """Return the label that a span name stands for, or None if the span is not one of ours."""
    match = _LABEL.fullmatch(text)
    if match is None or _ESCAPE.search(match[2]):
        return None
    try:
        name = unquote_to_bytes(match[2]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return Label(match[1], name)


def read_annotation(text: str) -> Label:
    """Return what a `record_function` name of anybody's stands for."""
    step = _STEP.fullmatch(text)
    return Label(STEP_KIND, step[1]) if step else Label(ANNOTATION_KIND, text)
