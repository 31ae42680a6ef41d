"""What is known of a graph as tables, for logs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from perfladder.tuning.specs import ScalarSpec, TensorSpec

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, header and rows."""

_SHOWN = 60


def tensor_table(title: str, specs: Sequence[TensorSpec]) -> Table:
    """Tensors with their shapes."""
    header = ("Access Path", "Semantic Path", "Shape", "Min Shape", "Max Shape", "Dtype")
    rows: list[tuple[str, ...]] = [
        (
            spec.access_path,
            str(spec.semantic_path),
            str(list(spec.shape)),
            str(list(spec.min_shape)),
            str(list(spec.max_shape)),
            spec.dtype,
        )
        for spec in specs
    ]
    return title, header, rows


def other_table(title: str, specs: Sequence[ScalarSpec]) -> Table:
    """Values that are no tensors."""
    rows: list[tuple[str, ...]] = [(spec.access_path, str(spec.semantic_path), _shown(spec)) for spec in specs]
    return title, ("Access Path", "Semantic Path", "Value"), rows


def _shown(spec: ScalarSpec) -> str:
    if not spec.value:
        return f"<{spec.type}, not looked into>"
    text = spec.value if len(spec.value) <= _SHOWN else spec.value[: _SHOWN - 3] + "..."
    return f"{text} and others" if spec.varies else text


def as_text(tables: Iterable[Table]) -> str:
    """Tables as plain text, each as wide as its cells."""
    from rich.console import Console
    from rich.table import Table as RichTable

    # A log has no width, and a path that is broken over two lines could not be copied.
    console = Console(file=io.StringIO(), width=10_000, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        for title, header, rows in tables:
            table = RichTable(*header)
            for row in rows:
                table.add_row(*row)
            console.print(f"{title}:")
            console.print(table)
    return captured.get()
