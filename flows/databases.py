"""One PostgreSQL database for both servers, in place of SQLite files of their own.

Both servers keep their version in a table of the same name, so that each gets a schema: `prefect` and `mlflow`.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from perfladder.errors import InputError, NotPossibleHereError

_CONNECT_LIMIT_S = 10.0
_DRIVERS = {"psycopg2": "psycopg2", "psycopg": "psycopg"}
"""Module to the name that SQLAlchemy has for it; MLflow installs none."""


class PostgresUrls(NamedTuple):
    """One database, as each server is told of it, and as it may be shown."""

    prefect: str
    mlflow: str
    shown: str


def postgres_urls(url: str) -> PostgresUrls:
    """Take a PostgreSQL address apart and write it for both servers.

    Raises:
        InputError: It is none, or has parameters.
        NotPossibleHereError: There is no driver for MLflow.
    """
    parts = urlsplit(url)
    expected = "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    if parts.scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise InputError(f"--database-url is of the kind {parts.scheme!r}; {expected}, or leave it out for SQLite.")
    if not parts.hostname or not parts.path.strip("/") or "/" in parts.path.strip("/"):
        raise InputError(f"--database-url names no host or no database; {expected}.")
    if parts.query:
        raise InputError(
            "--database-url has parameters after '?', which the two servers' drivers do not share. Leave them out, and "
            "set variables that both read, such as PGSSLMODE."
        )
    driver = next((name for module, name in _DRIVERS.items() if importlib.util.find_spec(module)), None)
    if driver is None:
        raise NotPossibleHereError("MLflow needs a driver for PostgreSQL: pip install psycopg2-binary.")
    where = f"{parts.netloc}{parts.path}"
    search_path = quote("-csearch_path=mlflow", safe="")
    host = parts.netloc.rpartition("@")[2]
    return PostgresUrls(
        prefect=f"postgresql+asyncpg://{where}",
        mlflow=f"postgresql+{driver}://{where}?options={search_path}",
        shown=f"postgresql://{host}{parts.path}",
    )


def create_schemas(url: str) -> None:
    """Make the two schemas where they are missing.

    Raises:
        NotPossibleHereError: The database cannot be reached, or may not be changed.
    """
    import asyncio

    try:
        asyncio.run(_create_schemas(url))
    except Exception as error:  # The driver's own errors share no base with those of the network.
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise NotPossibleHereError(
            f"The database of --database-url cannot be used: {reason}. It must exist, and its user must be allowed to "
            "create schemas in it."
        ) from error


async def _create_schemas(url: str) -> None:
    import asyncpg  # type: ignore[import-untyped]

    parts = urlsplit(url)
    connection = await asyncpg.connect(
        host=parts.hostname,
        port=parts.port or 5432,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        database=unquote(parts.path.strip("/")),
        timeout=_CONNECT_LIMIT_S,
    )
    try:
        for schema in ("prefect", "mlflow"):
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    finally:
        await connection.close()
