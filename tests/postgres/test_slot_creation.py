"""How the creation of a slot ends that waits for too long, where requests to cancel it are lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psycopg2
import pytest

from pg_cdc_source.errors import TransientError
from pg_cdc_source.postgres.catalog import Server
from pg_cdc_source.postgres.slot_creation import NewSlot, create_slot

STANDBY = Server(
    version_num=180000,
    in_recovery=True,
    wal_level="logical",
    effective_wal_level="logical",
    block_size=8192,
    role="reader",
    may_replicate=True,
    old_snapshot_threshold=None,
    service=None,
)


class Waiting:
    """A session whose command ends with the third request to cancel it: one fails, and one is lost."""

    def __init__(self) -> None:
        self.requests = 0
        self.connection = self
        self._ended = threading.Event()

    def cancel(self) -> None:
        self.requests += 1
        if self.requests == 1:
            raise psycopg2.OperationalError("no connection can be had for it")
        if self.requests == 3:
            self.end()

    def end(self) -> None:
        self._ended.set()

    def execute(self, command: str) -> None:
        assert self._ended.wait(30), "the command was never cancelled"
        raise psycopg2.errors.QueryCanceled("canceling statement due to user request")


class Watcher:
    """Another session, by which it is cancelled first: it is lost, finds no such slot, or may cancel."""

    def __init__(self, creating: Waiting, what: str) -> None:
        self._creating, self._what = creating, what

    @contextlib.contextmanager
    def cursor(self) -> Iterator[Watcher]:
        yield self

    def execute(self, command: str, parameters: tuple[str]) -> None:
        assert parameters == ("s",)
        if self._what == "lost":
            raise psycopg2.OperationalError("server closed the connection unexpectedly")
        if self._what == "cancels":
            self._creating.end()

    def fetchone(self) -> tuple[bool] | None:
        return (True,) if self._what == "cancels" else None


@pytest.mark.parametrize(("watcher", "requests"), [("lost", 3), ("finds nothing", 3), ("cancels", 0)])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_creation_is_cancelled_until_it_has_ended(given_up: bool, watcher: str, requests: int) -> None:
    event = threading.Event()
    if given_up:
        event.set()
    slot = NewSlot("s", True, False, 60.0 if given_up else 0.01, True, event)
    cursor = Waiting()
    with pytest.raises(TransientError, match="slot s found no consistent point"):
        # On a standby nobody is asked what it waits for.
        create_slot(cursor, slot, Watcher(cursor, watcher), STANDBY)
    assert cursor.requests == requests
