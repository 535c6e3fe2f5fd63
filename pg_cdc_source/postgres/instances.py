"""Which server a session has come to, told from every other that the same address may lead to.

A snapshot's id has a meaning on the server that exported it, and on no other. But an endpoint of replicas, a list of
hosts or a load balancer gives each connection another server, and the replicas of a cluster have the same system
identifier, timeline and databases. An id names a backend and a transaction by small numbers: it may exist on another
server by accident, and importing it there would read other rows without an error.

So who exports a snapshot notes its server, and who imports it looks first. When a server's first process has started
tells it from every other, and from itself before a restart, which no snapshot outlives.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import ServerSetupError, SnapshotLostError
from pg_cdc_source.postgres.server_errors import translated

ONE_SERVER = (
    "connect to one server: name the primary's or one instance's own endpoint, and not one that spreads connections "
    "over replicas; with several hosts set target_session_attrs=primary and no load_balance_hosts. After a "
    "failover: take a new snapshot, which loading the DataFrame or starting the query again does"
)


@dataclass(frozen=True, slots=True)
class Instance:
    """A running server. ``started`` is as precise as a microsecond; ``address`` is its own, empty without TCP."""

    started: str
    address: str
    in_recovery: bool

    def __str__(self) -> str:
        kind = "a standby" if self.in_recovery else "a primary"
        return f"{kind}{f' at {self.address}' if self.address else ''}, started at {self.started}"


# Expressions of Instance's fields.
INSTANCE = """
    (pg_postmaster_start_time() AT TIME ZONE 'UTC')::text,
    coalesce(host(inet_server_addr()) || ':' || inet_server_port(), ''),
    pg_is_in_recovery()"""


def read_instance(session: Session) -> Instance:
    with translated("reading which server this is"), session.cursor() as cursor:
        cursor.execute(f"SELECT {INSTANCE}")
        return Instance(*cursor.fetchone())


def require_instance(session: Session, expected: Instance, doing: str) -> None:
    """Raise SnapshotLostError where ``expected`` was restarted, ServerSetupError where this is another server."""
    found = read_instance(session)
    if found.started == expected.started:
        return
    if (found.address, found.in_recovery) == (expected.address, expected.in_recovery):
        raise SnapshotLostError(
            f"{doing}: the server that had the snapshot was restarted at {found.started}, and snapshots end with that",
            remedy="run the action again; where open_snapshot() or a stream's query holds the snapshot, open or start "
            "that again",
        )
    raise other_server(doing, expected, found)


def other_server(doing: str, expected: Instance, found: Instance) -> ServerSetupError:
    return ServerSetupError(
        f"{doing}: this connection leads to another server than the one before: {found}; it was {expected}",
        remedy=ONE_SERVER,
    )
