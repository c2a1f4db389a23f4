"""The monitor as a web page: plots over time, served by a process of its own.

The page and its chart library (uPlot) are files of this package; nothing is built and nothing is
loaded from elsewhere. It shows figures only: no prompt and no text is in them, and nothing can be
changed through it.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from adaspec.errors import AdaSpecError
from adaspec.hosts import is_loopback
from adaspec.monitor.follow import Monitor, Report, look
from adaspec.monitor.history import History, point

_PAGE = Path(str(files("adaspec.monitor") / "page"))
_TIMEOUT_S = 10.0
_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'self'",
            "style-src 'self' 'unsafe-inline'",  # the chart library styles its elements
            "img-src data:",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOOPBACK_NAMES = ["localhost", "127.0.0.1", "[::1]"]


class Watcher:
    """Reads a server at intervals, in a thread of its own, and remembers what it said.

    Args:
        monitor: turns readings into reports.
        url: base URL of the server.
        interval_s: between two readings.
        keep: called with every report, in the thread.
    """

    def __init__(
        self, monitor: Monitor, url: str, interval_s: float, keep: Callable[[Report], None]
    ) -> None:
        self._monitor = monitor
        self._url = url
        self._interval_s = interval_s
        self._keep = keep
        self._lock = threading.Lock()
        self._history = History()
        self._report = monitor.report(time.time())
        self._stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_asked.set()
        self._thread.join()

    def seen(self, after: float) -> bytes:
        """JSON: the newest report, and the points later than ``after``."""
        with self._lock:
            state = {"report": self._report, "points": self._history.after(after)}
        return msgspec.json.encode(state)

    def look(self, client: httpx.Client) -> None:
        """Read the server once."""
        report = look(self._monitor, client, self._url)
        with self._lock:
            self._report = report
            self._history.add(point(report))
        self._keep(report)

    def _run(self) -> None:
        with httpx.Client(timeout=_TIMEOUT_S) as client:
            while not self._stop_asked.is_set():
                self.look(client)
                self._stop_asked.wait(self._interval_s)


def application(watcher: Watcher, host: str) -> Starlette:
    """The page and its data.

    Args:
        host: that it is bound to. On loopback only loopback's names are answered to, so that a
            page of another site cannot read it through a name that it has pointed here.
    """

    def data(request: Request) -> Response:
        try:
            after = float(request.query_params.get("after", "0"))
        except ValueError:
            sentence = "after must be a Unix time in seconds, such as 1700000000.5."
            return Response(sentence, status_code=400, headers=_HEADERS, media_type="text/plain")
        return Response(watcher.seen(after), headers=_HEADERS, media_type="application/json")

    def page(_: Request) -> Response:
        text = (_PAGE / "index.html").read_bytes()
        return Response(text, headers=_HEADERS, media_type="text/html")

    names = _LOOPBACK_NAMES if is_loopback(host) else ["*"]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/data", data),
            Mount("/page", StaticFiles(directory=_PAGE)),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)],
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        AdaSpecError: if the address is taken or is none of this machine's.
    """
    try:
        return socket.create_server((host, port), family=_family(host))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
        raise AdaSpecError(
            f"the page cannot be served at {host}, port {port} ({reason}); choose another with "
            "--host and --port."
        ) from error


def serve(watcher: Watcher, listener: socket.socket, host: str) -> None:
    """Serve the page until the process is interrupted."""
    config = uvicorn.Config(
        application(watcher, host), log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    # Ctrl-C, which uvicorn passes on when it has stopped, is how one leaves.
    with watcher, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
