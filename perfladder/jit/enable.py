"""`import perfladder.jit.enable` switches just-in-time tuning on for the process."""

from __future__ import annotations

import sys
import types

from perfladder.jit import api


class _Callable(types.ModuleType):
    """An import makes the submodule an attribute of the package, in the place of the function of that name."""

    def __call__(self) -> None:
        api.enable()


sys.modules[__name__].__class__ = _Callable
api.enable()
