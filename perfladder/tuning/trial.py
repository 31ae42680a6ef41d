"""The child's side of a first build: `python -P -m perfladder.tuning.trial ANSWER_FD`, with the work on stdin."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import sys
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

    from perfladder._torch_private import inductor_cache
    from perfladder.backend.base import BuildRequest

    try:
        # Written by the parent process into this process's own pipe a moment ago; nothing else is ever unpickled.
        work = pickle.load(work_stream)  # type: ignore[arg-type]
        module, device = work["module"], torch.device(work["device"])
        _lend_names_to_main(module)
        request = BuildRequest(module, module.forward, work["graph"], work["samples"], device, Path(work["folder"]))
        cache_dir = work["cache_dir"]
        with nullcontext() if cache_dir is None else inductor_cache(cache_dir), torch.no_grad():
            built = work["backend"].build(request)
            for args, kwargs in request.calls():
                built.call(*args, **kwargs)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _lend_names_to_main(module: nn.Module) -> None:
    """Code of the parent's script comes with names of its own, which compilers look for in the main module."""
    main = sys.modules["__main__"].__dict__
    for kind in {type(part) for part in module.modules()}:
        for function in vars(kind).values():
            if inspect.isfunction(function) and function.__module__ == "__main__":
                for name, value in function.__globals__.items():
                    main.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
