"""Stands for `python -m prefect server start ... --port N`: what it does is its file's name, such as `answers-1.py`."""

import http.server
import sys
import time
from pathlib import Path


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


kind = Path(sys.argv[0]).stem
if kind == "ends":
    sys.exit("port taken, or what else there is")
if kind == "hangs":
    time.sleep(600)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
