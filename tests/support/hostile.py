"""Backends that crash, hang or eat memory while they build; imported by the process that tries them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from toys import Faster

from perfladder.backend import BuildRequest, Built
from perfladder.tuning.build_log import tell


class Hostile(Faster):
    """Built in a process of its own."""

    is_isolated = True


class Exits(Hostile):
    name = "toy_exits"

    def compile(self, request: BuildRequest) -> Built:
        print("about to leave", flush=True)
        os._exit(3)


class ExitsQuietly(Hostile):
    name = "toy_exits_quietly"

    def compile(self, request: BuildRequest) -> Built:
        os._exit(0)


class Segfaults(Hostile):
    name = "toy_segfaults"

    def compile(self, request: BuildRequest) -> Built:
        ctypes.string_at(0)
        raise AssertionError("reading address 0 went well")


class CrashesWhenRun(Hostile):
    name = "toy_crashes_when_run"

    def compile(self, request: BuildRequest) -> Callable[..., Any]:
        return lambda *_args: os.kill(os.getpid(), signal.SIGABRT)


class Hangs(Hostile):
    """It starts a process as well, as compilers do."""

    name = "toy_hangs"

    def compile(self, request: BuildRequest) -> Built:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
        raise AssertionError("nobody waits so long")


class EatsMemory(Hostile):
    name = "toy_eats_memory"

    def compile(self, request: BuildRequest) -> Built:
        held = []
        for _ in range(64):
            held.append(torch.ones(16 << 20, dtype=torch.uint8))
            time.sleep(0.1)
        time.sleep(60)
        raise AssertionError("nobody ended it")


class Raises(Hostile):
    name = "toy_raises"

    def compile(self, request: BuildRequest) -> Built:
        raise NotImplementedError("an operator is not supported")


class Leaves(Hostile):
    """Good, but leaves a process behind."""

    name = "toy_leaves"

    def compile(self, request: BuildRequest) -> Built:
        if os.environ.get("PERFLADDER_TEST_PARENT") != str(os.getpid()):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return super().compile(request)


class Talks(Hostile):
    """Says something by every way that there is, and more than a log holds."""

    name = "toy_talks"

    def compile(self, request: BuildRequest) -> Built:
        print("to stdout")
        os.write(1, b"past Python\n")
        print("to stderr", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('of a process that it started')"], check=True)
        logging.getLogger("toy.exporter").warning("a log record")
        warnings.warn("a warning", RuntimeWarning, stacklevel=1)
        tell("told by an exporter")
        print("x" * (3 << 20))
        print("the end", flush=True)
        return super().compile(request)
