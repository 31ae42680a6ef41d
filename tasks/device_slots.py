"""A global concurrency limit for each device, so that workers which share a Prefect server measure in turn.

The file lock of the machine stays what makes a measurement exclusive; it needs no server. The limit reaches further:
to workers in containers, which do not see each other's files, and into Prefect's pages.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectException
from prefect.runtime import flow_run

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LEASE_S = 60.0
"""The shortest lease that Prefect grants: so long after its holder's death a slot is free again."""

_TELL_EVERY_S = 30.0


def slot_name(device: str) -> str:
    """The limit's name: a device's UUID is known all over the world, and any other name on its machine only."""
    is_local = device == "cpu" or ":" in device
    return f"perfladder-{device}-{platform.node()}" if is_local else f"perfladder-{device}"


@contextmanager
def device_slots(
    devices: Sequence[str], tell: Callable[[str], None], *, tell_every_s: float = _TELL_EVERY_S
) -> Iterator[None]:
    """Hold one slot of each device's limit, made where there is none, until the block ends or this process dies.

    A server that grants none costs no measurement: that is told, and the machine's own lock has to do.

    Args:
        devices: As the file locks name them.
        tell: Shows one line.
        tell_every_s: How often it is told that others are waited for.
    """
    held = ExitStack()
    with _told(tell, "gives no slot of the devices; other machines and containers may measure on them meanwhile"):
        _acquire(held, [slot_name(device) for device in devices], tell, tell_every_s)
    try:
        yield
    finally:
        with _told(tell, f"did not take the slots of the devices back; they are free after {LEASE_S:g} s"):
            held.close()


def _acquire(held: ExitStack, names: list[str], tell: Callable[[str], None], tell_every_s: float) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import ConcurrencyLeaseHolder
    from prefect.concurrency.sync import concurrency

    own_id = flow_run.get_id()
    holder = ConcurrencyLeaseHolder(type="flow_run", id=own_id) if own_id else None
    with get_client(sync_client=True) as client:
        taken = [_is_taken(client, name) for name in names]
    what = f"Waiting for the concurrency limit {', '.join(names)} of the Prefect server: another run measures there."
    is_over = threading.Event()
    if any(taken):
        tell(what)
    # Not by a limit of Prefect's own on the wait: it logs each one that passes as an error.
    threading.Thread(target=_keep_telling, args=(what, tell, tell_every_s, is_over), daemon=True).start()
    try:
        held.enter_context(concurrency(names, lease_duration=LEASE_S, strict=False, holder=holder))
    finally:
        is_over.set()


def _keep_telling(what: str, tell: Callable[[str], None], every_s: float, is_over: threading.Event) -> None:
    while not is_over.wait(every_s):
        tell(what)


def _is_taken(client: SyncPrefectClient, name: str) -> bool:
    """Whether all slots of a limit are taken; it is made where there is none."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    try:
        found = client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        try:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        except ObjectAlreadyExists:
            return _is_taken(client, name)
        return False
    return found.active_slots >= found.limit


@contextmanager
def _told(tell: Callable[[str], None], what: str) -> Iterator[None]:
    import httpx
    from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

    try:
        yield
    except (httpx.HTTPError, PrefectException, ConcurrencySlotAcquisitionError) as error:
        tell(f"The Prefect server {what}: {error!r}.")
