"""Serve a tuned archive over HTTP.

    python serve.py serving/model.ait
    for worker in 1 2 3 4; do OMP_NUM_THREADS=2 python serve.py serving/model.ait --share-port --threads 2 & done; wait

`POST /predict` takes {"inputs": [[64 numbers], ...]} and returns {"outputs": [[10 numbers], ...]}; `GET /health`
answers once the model is warm. Needs perfladder, the runtime of the backend that was chosen, fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import torch
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from model import MAX_BATCH_SIZE, NUM_FEATURES, build
from pydantic import BaseModel, Field, FiniteFloat

import perfladder as pl

# Beyond it the model's own numbers would overflow, and the answer be none.
Number = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]
Row = Annotated[list[Number], Field(min_length=NUM_FEATURES, max_length=NUM_FEATURES)]


class Request(BaseModel):
    """Rows to classify; anything else is refused with status 422 before it reaches the model."""

    inputs: list[Row] = Field(min_length=1, max_length=MAX_BATCH_SIZE)


class Answer(BaseModel):
    """Probabilities, a list for each row."""

    outputs: list[list[float]]


def load(archive: Path, *, trust: bool) -> Any:
    """The tuned model, warm: whatever is compiled or allocated at a first call is there before a client waits for it.

    Args:
        archive: As `tune.py` wrote it.
        trust: Also load files that are code, as Inductor ahead of time writes: only archives of your own.
    """
    # A request that was not tuned for is an error here; without this line it runs in the plain module, unnoticed.
    pl.config.unseen_graph = "error"
    model = pl.load(build(), archive.absolute(), trust=trust)
    with torch.inference_mode():
        for size in range(1, MAX_BATCH_SIZE + 1):
            model(torch.zeros(size, NUM_FEATURES))
    return model


def create_app(archive: Path, *, threads: int = 4, trust: bool = False) -> FastAPI:
    """The application.

    Args:
        archive: As `tune.py` wrote it.
        threads: Requests that are computed at a time; others wait. Calls of a tuned module need no lock.
        trust: See `load`.
    """
    models: list[Any] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = threads
        models.append(load(archive, trust=trust))
        yield
        models.clear()

    app = FastAPI(title="A tuned model", lifespan=lifespan)

    # The usual answer repeats the input, and NaN cannot be written as JSON.
    @app.exception_handler(RequestValidationError)
    async def refuse(_: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        told = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
        return JSONResponse({"detail": told}, status_code=422)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ready", "process": str(os.getpid())}

    # Not `async`: it runs in one of the threads, and the event loop takes requests meanwhile.
    @app.post("/predict")
    def predict(request: Request) -> Answer:
        with torch.inference_mode():
            return Answer(outputs=models[0](torch.tensor(request.inputs)).tolist())

    return app


def listening(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """A socket that clients can connect to once the server listens.

    Connections inherit its TCP_NODELAY; without, each answer waits up to 40 ms for the client's acknowledgement.

    Args:
        host: An address of this machine.
        port: 0: any that is free.
        is_shared: Let several processes of this user listen there, among which the kernel divides connections.
    """
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR, 1)
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place.bind((host, port))
    return place


def main() -> None:
    """Serve until SIGTERM or Ctrl-C; requests that have begun are answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free; it is printed")
    parser.add_argument("--share-port", action="store_true", help="Let other processes of this server listen there too")
    parser.add_argument("--threads", type=int, default=4, help="Requests that are computed at a time")
    parser.add_argument("--trust", action="store_true", help="Load files that are code; only archives of your own")
    options = parser.parse_args()
    app = create_app(options.archive, threads=options.threads, trust=options.trust)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=10)
    with listening(options.host, options.port, is_shared=options.share_port) as place:
        print(f"http://{options.host}:{place.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[place])


if __name__ == "__main__":
    main()
