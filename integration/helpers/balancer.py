"""An endpoint that leads to several servers: which one, each connection's application_name decides."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from psycopg2.extensions import make_dsn, parse_dsn


@contextlib.contextmanager
def balanced(url: str, route: Callable[[str], str], drops: bytes = b"") -> Iterator[str]:
    """Run one on the loopback interface; ``route`` gives the URL of the server for an application_name.

    Yields ``url`` as it leads there. Clients must not ask for encryption first, so that their names can be read. A
    parameter that it ``drops`` does not reach the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        threading.Thread(target=_serve, args=(listener, route, drops), daemon=True).start()
        there = {**parse_dsn(url), "host": "127.0.0.1", "port": port}
        yield make_dsn(**there, sslmode="disable", gssencmode="disable")


def _serve(listener: socket.socket, route: Callable[[str], str], drops: bytes) -> None:
    # Closing the listener ends this.
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_connect, args=(client, route, drops), daemon=True).start()


def _connect(client: socket.socket, route: Callable[[str], str], drops: bytes) -> None:
    # A server that is away refuses the connection, and its client finds this one closed.
    with client, contextlib.suppress(OSError):
        head = _receive(client, 4)
        if not head:
            return  # a probe
        startup = _receive(client, struct.unpack(">I", head)[0] - 4)
        # The protocol's version, then names and values, each with a zero byte after it. A request to cancel has none.
        fields = startup[4:].split(b"\0")
        name = fields[fields.index(b"application_name") + 1].decode() if b"application_name" in fields else ""
        to = parse_dsn(route(name))
        with socket.create_connection((to["host"], int(to["port"]))) as server:
            if drops and drops in fields[::2]:
                at = 2 * fields[::2].index(drops)
                startup = startup[:4] + b"\0".join(fields[:at] + fields[at + 2 :])
            server.sendall(struct.pack(">I", len(startup) + 4) + startup)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _receive(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := source.recv(count - len(data))):
        data += more
    return data


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
