"""Runs the studio's application on a socket, and opens the browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from typing import Any

from foresight.errors import UserError

HERE = ("127.0.0.1", "localhost", "::1")
TRIED = 20  # ports after the one asked for


def listen(host: str, port: int) -> socket.socket:
    """A socket on the first free port from `port` on. Raises UserError if there is none, or for an unknown host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = ""
    for number in range(port, min(port + TRIED, 65_536)):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(2048)
            return found
        except OSError as error:
            found.close()
            problem = error.strerror or str(error)
    raise UserError(f"Cannot listen on {host}, ports {port} to {port + TRIED - 1}: {problem}. Choose another --port.")


def address(host: str, port: int, token: str | None) -> str:
    """The URL to open; with a token for a page that others can reach."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # all addresses of this machine
        name = socket.gethostname()
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def run(app: Any, taken: socket.socket, address: str | None) -> None:
    """Serve until Ctrl-C; open `address` in the browser, if there is one, as soon as the server answers."""
    import uvicorn

    from foresight.studio.app import warm_up

    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="off")
    )
    if address is not None:
        threading.Timer(0.5, webbrowser.open, (address,)).start()
    warm_up()
    server.run(sockets=[taken])
