"""A sweep before it runs: its members, and what starts them: threads, or a Ray or Dask cluster, which are optional."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.flows.begin import workload_file
from perfladder.flows.config import SweepConfig
from perfladder.tasks.variables import variables_set
from perfladder.variations import Member, Runner, plan_members

_PACKAGES: dict[Runner, str] = {"ray": "prefect_ray", "dask": "prefect_dask"}

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Ray and Dask set these in their workers, where they would change what is measured."""


def members_of(config: SweepConfig) -> list[Member]:
    """The climbs that a config asks for.

    Raises:
        InputError: A workload or a field that is none.
    """
    files = []
    for workload in config.workloads:
        file = workload_file(workload, config.base_dir)
        files.append((workload if isinstance(workload, str) else file.workload.name, file))
    return plan_members(files, config.vary)


def check_runner(config: SweepConfig, server_url: str | None) -> None:
    """Find what is missing before anything is started.

    Args:
        config: The sweep.
        server_url: The Prefect server that the user's settings name.

    Raises:
        InputError: An option that this runner does not have, or machines that would not find the server.
        NotPossibleHereError: The runner's package is not installed.
    """
    package = _PACKAGES.get(config.runner)
    if package is not None and importlib.util.find_spec(package) is None:
        raise NotPossibleHereError(
            f"runner: {config.runner!r} needs {package.replace('_', '-')}, which is not installed. Install with: "
            f"pip install 'perfladder[{config.runner}]'; or choose 'threads'."
        )
    if config.address is not None and package is None:
        raise InputError("address: 'threads' are of this process and have none. Leave it out, or choose ray or dask.")
    if config.address is not None and server_url is None:
        raise InputError(
            "address: the cluster's machines need a Prefect server that they reach. Set PREFECT_API_URL to its address."
        )
    if config.gpus_per_member and config.runner != "ray":
        raise InputError(
            "gpus_per_member: only ray reserves GPUs. Leave it out; with dask, start each worker with its own "
            "CUDA_VISIBLE_DEVICES."
        )


def member_variables(server_url: str | None) -> dict[str, str | None]:
    """What a member's environment has from this process, whichever process starts it."""
    kept: dict[str, str | None] = {name: os.environ.get(name) for name in _THREADS}
    return kept | ({"PREFECT_API_URL": server_url} if server_url else {})


@contextmanager
def started_runner(config: SweepConfig) -> Iterator[Any]:
    """The runner that the config asks for, started; its package is imported only here.

    Raises:
        NotPossibleHereError: It does not start.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0"} if config.runner == "ray" else {}
    with variables_set(quiet), ExitStack() as stack:
        try:
            runner = stack.enter_context(_make(config))
        except Exception as error:  # The clusters' errors share no base.
            raise NotPossibleHereError(
                f"runner: {config.runner!r} cannot be started or reached: {error}. Look at its address and its log, or "
                "choose 'threads'."
            ) from error
        yield runner


def reserving(config: SweepConfig) -> Any:
    """A context in which what is submitted gets its GPUs."""
    if config.runner != "ray":
        return nullcontext()
    return importlib.import_module("prefect_ray.context").remote_options(num_cpus=1, num_gpus=config.gpus_per_member)


def _make(config: SweepConfig) -> Any:
    if config.runner == "ray":
        local = {
            "num_cpus": config.at_once,
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": logging.WARNING,
        }
        return importlib.import_module("prefect_ray").RayTaskRunner(
            address=config.address, init_kwargs={} if config.address else local
        )
    if config.runner == "dask":
        runner = importlib.import_module("prefect_dask").DaskTaskRunner
        # At its own level, which importing it has set, each connection of the cluster is a line.
        logging.getLogger("distributed").setLevel(logging.ERROR)
        if config.address:
            return runner(address=config.address)
        # Processes of one thread: each climb is a process of its own below one of them.
        own = {"n_workers": config.at_once, "threads_per_worker": 1, "dashboard_address": None}
        return runner(cluster_kwargs=own)
    from prefect.task_runners import ThreadPoolTaskRunner

    return ThreadPoolTaskRunner(max_workers=config.at_once)
