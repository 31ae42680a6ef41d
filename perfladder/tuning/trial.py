"""The child's side of a first build: `python -P -m perfladder.tuning.trial ANSWER_FD`, with the work on stdin."""

from __future__ import annotations

import inspect
import json
import logging
import os
import pickle
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def main(arguments: list[str]) -> int:
    """Build, run all samples, and tell how that went."""
    answer_fd = int(arguments[0])
    os.set_inheritable(answer_fd, False)
    work_stream = sys.stdin.buffer
    sys.path[:] = json.loads(work_stream.readline())
    error = _try(work_stream)
    os.write(answer_fd, json.dumps({"error": error}).encode())
    # Threads and pools of a compiler need not be waited for.
    os._exit(0)


def _try(work_stream: object) -> str | None:
    import torch

    from perfladder.backend.base import BuildRequest
    from perfladder.tuning.build_log import told_by
    from perfladder.tuning.inductor_folder import inductor_cache

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        # Written by the parent process into this process's own pipe a moment ago; nothing else is ever unpickled.
        work = pickle.load(work_stream)  # type: ignore[arg-type]
        module, device = work["module"], torch.device(work["device"])
        _lend_names(module)
        folders = Path(work["folder"]), work["shared_folder"]
        request = BuildRequest(module, module.forward, work["graph"], work["samples"], device, *folders)
        cache_dir = work["cache_dir"]
        with (
            nullcontext() if cache_dir is None else inductor_cache(cache_dir),
            torch.no_grad(),
            told_by(lambda line: print(line, file=sys.stderr, flush=True)),
        ):
            built = work["backend"].build(request)
            for args, kwargs in request.calls():
                built.call(*args, **kwargs)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _lend_names(module: nn.Module) -> None:
    """Code that came by value has names of its own, which compilers look for in the module that it is of."""
    for kind in {type(part) for part in module.modules()}:
        for function in vars(kind).values():
            if not inspect.isfunction(function):
                continue
            name = function.__module__
            if name != "__main__" and name in sys.modules:
                continue
            names = sys.modules.setdefault(name, types.ModuleType(name)).__dict__
            for key, value in function.__globals__.items():
                names.setdefault(key, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
