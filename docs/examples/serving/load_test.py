"""Send requests to a running server, check every answer, and print latencies and throughput.

    python load_test.py http://127.0.0.1:8000 serving/expected.json
    python load_test.py http://127.0.0.1:8000 serving/expected.json --requests 2000 --clients 8 --json

Latencies are those of a client: HTTP, queue and model together. Ends after so many requests or so much time, with exit
code 1 if an answer was wrong or missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Errors that answers may have; backends compute in another order, and at lower precision more is due."""


class Clients:
    """Threads that send requests in turns, each over a connection of its own.

    Args:
        url: Of the server.
        cases: Requests with their answers.
        limit: Of requests, all clients together.
        max_s: No request begins later.
    """

    def __init__(self, url: str, cases: list[dict[str, Any]], limit: int, max_s: float) -> None:
        self.latencies_ms: list[float] = []
        self.num_rows = 0
        self.errors: list[str] = []
        self._url, self._cases, self._limit, self._max_s = url, cases, limit, max_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._deadline = 0.0

    def run(self, count: int) -> float:
        """Let so many clients work; returns the time that they took, in seconds."""
        threads = [threading.Thread(target=self._work) for _ in range(count)]
        start = time.perf_counter()
        self._deadline = start + self._max_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30.0, trust_env=False) as client:
            while (number := next(self._numbers)) < self._limit and time.perf_counter() < self._deadline:
                case = self._cases[number % len(self._cases)]
                start = time.perf_counter()
                error = self._asked(client, case)
                latency_ms = (time.perf_counter() - start) * 1000
                with self._lock:
                    self.latencies_ms.append(latency_ms)
                    self.num_rows += len(case["inputs"])
                    if error is not None:
                        self.errors.append(f"request {number}: {error}")

    def _asked(self, client: httpx.Client, case: dict[str, Any]) -> str | None:
        """Why the answer to a request is not right; None if it is."""
        try:
            response = client.post("/predict", json={"inputs": case["inputs"]})
            response.raise_for_status()
            found, right = np.asarray(response.json()["outputs"]), np.asarray(case["outputs"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        if found.shape != right.shape:
            return f"it has the shape {list(found.shape)}, not {list(right.shape)}"
        error = float(np.abs(found - right).max())
        return None if np.allclose(found, right, RELATIVE, ABSOLUTE) else f"it is off by up to {error:.3g}"


def main() -> int:
    """Send, check, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("expected", type=Path, help="As tune.py wrote it")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-s", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clients = Clients(options.url, json.loads(options.expected.read_text()), options.requests, options.max_s)
    wall_s = clients.run(options.clients)
    if not clients.latencies_ms:
        sys.exit("No request was sent: --requests and --max-s have to be above 0.")
    p50_ms, p95_ms = np.percentile(clients.latencies_ms, [50, 95])
    result = {
        "num_requests": len(clients.latencies_ms),
        "num_wrong": len(clients.errors),
        "latency_p50_ms": round(float(p50_ms), 3),
        "latency_p95_ms": round(float(p95_ms), 3),
        "requests_per_s": round(len(clients.latencies_ms) / wall_s, 1),
        "rows_per_s": round(clients.num_rows / wall_s, 1),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(", ".join(f"{name} {value}" for name, value in result.items()))
    for error in clients.errors[:5]:
        print(error, file=sys.stderr)
    return 1 if clients.errors else 0


if __name__ == "__main__":
    sys.exit(main())
