"""Which file an archive's name means: where `save` writes it, and where `load` and workload files look for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from perfladder.errors import ArchiveError, InputError

_logger = logging.getLogger("perfladder.tuning")

_FOLDER: Final = "checkpoints"
_SUFFIX: Final = ".ait"


def archive_path(path: str | Path) -> Path:
    """The file that `save` writes: with the ending, and for a bare name in the folder `checkpoints`.

    Raises:
        InputError: It cannot be the name of an archive.
    """
    target = _with_ending(path, "path")
    return Path(_FOLDER) / target if _is_bare(path) else target


def archive_places(path: str | Path, folder: Path | None = None, *, field_name: str = "path") -> list[Path]:
    """Where `load` looks, in this order: under the name as it is, and for a bare one in the folder `checkpoints`.

    Args:
        path: As it was given.
        folder: What it is relative to; None: the current folder.
        field_name: What the user called it, for messages.

    Raises:
        InputError: It cannot be the name of an archive.
    """
    base = folder or Path()
    target = _with_ending(path, field_name)
    return [base / target, base / _FOLDER / target] if _is_bare(path) else [base / target]


def find_archive(path: str | Path, folder: Path | None = None, *, field_name: str = "path") -> Path:
    """The file that `load` reads; the arguments are those of `archive_places`.

    Raises:
        ArchiveError: There is none.
        InputError: It cannot be the name of an archive.
    """
    places = archive_places(path, folder, field_name=field_name)
    found = [place for place in places if place.is_file()]
    if not found:
        looked = [str(place.absolute()) for place in places]
        why = f"neither {' nor '.join(looked)} is a file" if len(looked) > 1 else f"{looked[0]} is no file"
        raise ArchiveError(
            f"{field_name}: there is no archive {str(path)!r}: {why}. Give the path of one that "
            "`perfladder tune --save` or pl.save wrote."
        )
    if len(found) > 1:
        _logger.warning(
            "There are two archives of this name; %s is loaded, and %s is not. Give the path of the one you mean.",
            *found,
        )
    return found[0]


def _with_ending(path: str | Path, field_name: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"{field_name}: expected the name of an archive, such as 'tuned.ait', not a {type(path).__name__}."
        )
    target = Path(path)
    if not target.name.isprintable():
        raise InputError(
            f"{field_name}: {target.name!r} has control characters; an archive with such a name cannot be read."
        )
    if not target.name:
        raise InputError(f"{field_name}: expected the name of an archive, such as 'tuned.ait'.")
    if target.suffix == _SUFFIX:
        return target
    if target.suffix:
        raise InputError(f"{field_name}: {target.name} ends in {target.suffix}; an archive ends in {_SUFFIX}.")
    return target.with_name(target.name + _SUFFIX)


def _is_bare(path: str | Path) -> bool:
    """A name without any folder; `./x.ait` says in which folder it is."""
    return os.sep not in os.fspath(path)
