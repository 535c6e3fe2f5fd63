"""How long a task waits for a snapshot where it sees no keeper."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import SnapshotLostError
from pg_cdc_source.postgres import backoff
from pg_cdc_source.postgres.instances import Instance
from pg_cdc_source.postgres.snapshots import SnapshotSpec
from pg_cdc_source.snapshot import board
from pg_cdc_source.snapshot.board import LOST_KEEPER_SECONDS, Request, Snapshot

INSTANCE = Instance("2026-11-22 18:00:00.123456", "10.0.0.1:5432", False)
REQUEST = Request("17", 60.0, 20, True, "/lsn", SnapshotSpec("require", None, 60.0))
FOUND = Snapshot(("00000003-0000001B-1",), None)

# Whether the keeper is seen, and the snapshot, by the seconds since the wait began.
Look = Callable[[float], tuple[bool, Snapshot | None]]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[Look], tuple[float, Snapshot | type[SnapshotLostError]]]:
    """``wait(look)``: when the wait for a snapshot ends, in seconds of a clock that only pauses move on, and how."""
    seconds = 0.0

    def sleep(pause_seconds: float) -> None:
        nonlocal seconds
        seconds += pause_seconds

    clock = SimpleNamespace(monotonic=lambda: seconds, sleep=sleep)
    for module in (board, backoff):
        monkeypatch.setattr(module, "time", clock)
    for name, fake in (("_ring", None), ("_check_fits", None), ("read_instance", INSTANCE)):
        monkeypatch.setattr(board, name, lambda *_, fake=fake: fake)

    def wait(look: Look) -> tuple[float, Snapshot | type[SnapshotLostError]]:
        monkeypatch.setattr(board, "_look", lambda *_: look(seconds))
        try:
            found = board.find_snapshot(cast(Session, None), "keeper", REQUEST, INSTANCE)
            return seconds, found
        except SnapshotLostError as error:
            return seconds, type(error)

    return wait


def test_a_keeper_that_never_comes_is_given_up(wait: Any) -> None:
    seconds, found = wait(lambda _: (False, None))
    assert found is SnapshotLostError
    assert LOST_KEEPER_SECONDS < seconds < LOST_KEEPER_SECONDS + 1


def test_a_keeper_that_connects_again_late_in_the_wait_is_waited_for(wait: Any) -> None:
    _, found = wait(lambda seconds: (not 20 < seconds < 21, FOUND if seconds > 25 else None))
    assert found is FOUND


def test_a_keeper_that_goes_for_good_late_in_the_wait_is_given_up(wait: Any) -> None:
    seconds, found = wait(lambda seconds: (seconds < 20, None))
    assert found is SnapshotLostError
    assert 20 + LOST_KEEPER_SECONDS - 0.5 < seconds < 20 + LOST_KEEPER_SECONDS + 1
