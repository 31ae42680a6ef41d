"""Headless Chromium over its debugging protocol: open a page, ask it, and hear its console and its requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 200.0


class Browser:
    """One tab. Use it as a context; the browser ends with the block."""

    def __init__(self) -> None:
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        from websockets.sync.client import connect

        assert CHROMIUM is not None, "the test is skipped where no Chromium is installed"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        command = [CHROMIUM, *options, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._socket = connect(self._tab_address(), max_size=None)
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.look()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is there and all its plots are drawn or have failed."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(
            "document.readyState === 'complete' && location.protocol === 'file:' && "
            "Number(document.documentElement.dataset.plotsDrawn || 0)"
            " + Number(document.documentElement.dataset.plotsFailed || 0)"
            " >= document.querySelectorAll('[data-plot]').length"
        )

    def look(self, *, width: int = 1280, is_dark: bool = False, is_print: bool = False) -> None:
        """Show the page in a window of that width, in light or dark, on the screen or as printed."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if is_print else "", features=[feature])

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _LIMIT_S
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"not true within {_LIMIT_S:.0f} s: {condition}; errors: {self.errors}"
            time.sleep(0.2)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab` or `Enter`."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; what is heard meanwhile is kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_LIMIT_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert")
        ):
            self.errors.append(json.dumps(found)[:500])
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def _tab_address(self) -> str:
        """Chromium writes its port into its profile."""
        told = Path(self._profile.name) / "DevToolsActivePort"
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            assert self._process.poll() is None, f"Chromium ended with {self._process.returncode}"
            if told.is_file() and (lines := told.read_text().splitlines()):
                with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json", timeout=_LIMIT_S) as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                if tabs:
                    return str(tabs[0]["webSocketDebuggerUrl"])
            time.sleep(0.05)
        raise AssertionError("Chromium did not open its debugging port")

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._profile.cleanup()
