"""Quiet third parties."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_own_messages() -> Iterator[None]:
    """Let log handlers pass perfladder's messages only, inside the block."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    handlers = list(dict.fromkeys(handler for logger in (logging.root, *loggers) for handler in logger.handlers))
    for handler in handlers:
        handler.addFilter(_is_own)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_own)


def _is_own(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "perfladder"
