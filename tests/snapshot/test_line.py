"""Executions in line for snapshots: who shares one, and when there is room for one more, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from pg_cdc_source.errors import ConnectError, PgCdcError, SnapshotLostError, TransientError
from pg_cdc_source.options.conninfo import ConnectionOptions
from pg_cdc_source.options.declared import ConsistentPoint
from pg_cdc_source.postgres import connection
from pg_cdc_source.postgres.snapshots import Held, Holder, SnapshotSpec
from pg_cdc_source.snapshot.board import LINE_SECONDS, Request
from pg_cdc_source.snapshot.connections import keeper_share, kept_share, planning_share
from pg_cdc_source.snapshot.keeper import executions
from pg_cdc_source.snapshot.keeper import shared as snapshots
from pg_cdc_source.snapshot.keeper.executions import (
    GONE_SECONDS,
    IDLE_SECONDS,
    OWN_SECONDS,
    POOL_SECONDS,
    Executions,
)
from pg_cdc_source.snapshot.keeper.shared import MEND_SECONDS, Shared


class OpenSession:
    """Stands for a holder's session."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed = 1


class NoMarks:
    """Stands for marks; knows which executions have one."""

    def __init__(self) -> None:
        self.shown: dict[str, PgCdcError] = {}

    def show(self, execution: str, why: PgCdcError) -> None:
        self.shown[execution] = why

    def __len__(self) -> int:
        return 0


class NoWorkers:
    """Takes work and leaves it undone until ``finish``."""

    def __init__(self) -> None:
        self.undone: list[Callable[[], Any]] = []

    def submit(self, work: Callable[[], Any]) -> None:
        self.undone.append(work)

    def finish(self) -> None:
        while self.undone:
            self.undone.pop(0)()()


class Line:
    """The executions of a keeper of ``most_sessions`` that makes its snapshots when ``make`` is called."""

    def __init__(self, most_sessions: int = 100) -> None:
        self.marks = NoMarks()
        self.workers = NoWorkers()
        self.executions = Executions(ConnectionOptions(), "k", cast(Any, self.marks), cast(Any, self.workers))
        self.executions.most_sessions = most_sessions

    def ask(self, *keys: str, point: ConsistentPoint = "auto", slot: str | None = None, shows_lsn: bool = True) -> None:
        for key in keys:
            self.executions.begin(Request(key, 60.0, 20, shows_lsn, "", SnapshotSpec(point, slot, 10.0)))

    def serve(self, after_seconds: float = 0.0) -> list[tuple[str, ...]]:
        """Look, and serve the line; returns for whom snapshots are being made then."""
        self.executions.make_room(time.monotonic() + after_seconds)
        self.executions.serve_line(time.monotonic() + after_seconds)
        return [shared.keys for shared in self.executions.snapshots() if shared.held is None]

    def shared(self, key: str) -> Shared | None:
        execution = self.executions.get(key)
        assert execution is not None
        return execution.shared

    def make(self, holders: int = 1) -> list[Shared]:
        """Make the snapshots that are being made, each with sessions that nobody has."""
        made = [shared for shared in self.executions.snapshots() if shared.held is None]
        for shared in made:
            opened = [Holder(cast(Any, OpenSession()), "id") for _ in range(holders)]
            shared.held = Held(None, cast(Any, None), (), opened)
            shared.exported = dict.fromkeys(shared.keys, "id")
            shared.busy = False
        self.workers.undone.clear()
        return made


def test_all_that_wait_at_a_moment_share_one_snapshot() -> None:
    line = Line()
    line.ask("1", "2", "3")
    assert line.serve() == [("1", "2", "3")]


def test_who_asks_while_a_snapshot_is_made_shares_the_next_one() -> None:
    line = Line()
    line.ask("1")
    line.serve()
    line.ask("2", "3")
    assert line.serve() == [("1",)]
    line.make()
    assert line.serve() == [("2", "3")]


def test_only_those_share_who_ask_for_the_same() -> None:
    line = Line()
    line.ask("1", "2")
    line.ask("3", point="off")
    line.ask("4", "5", slot="s")
    line.ask("r6", "r7")
    assert line.serve() == [("1", "2", "r6", "r7"), ("3",), ("4",), ("5",)]


def test_a_snapshot_ends_with_its_last_execution() -> None:
    line = Line()
    line.ask("1", "2")
    line.serve()
    [shared] = line.make()
    assert shared.held is not None
    [(session, _)] = shared.held.holders
    why = SnapshotLostError("over")
    for key, closed in (("1", 0), ("2", 1)):
        execution = line.executions.get(key)
        assert execution is not None
        line.executions.end(execution, why)
        assert session.closed == closed


def test_without_room_executions_wait_and_then_share() -> None:
    line = Line(most_sessions=5)  # the keeper's own, two, and two that are kept for pools
    for key in ("1", "2"):
        line.ask(key)
        line.serve()
        line.make()
    line.ask("3", "4")
    assert line.serve() == []
    # Once nobody has read in the oldest for a while, it makes room.
    assert line.serve(IDLE_SECONDS + 0.1) == [("3", "4")]
    assert line.executions.get("1") is None
    assert line.executions.get("2") is not None
    assert line.executions.tell_why_ended("1")
    assert type(line.marks.shown["1"]) is SnapshotLostError
    assert "maxConnections" in line.marks.shown["1"].remedy


def test_a_snapshot_that_is_read_makes_no_room() -> None:
    line = Line(most_sessions=2)
    line.ask("1")
    line.serve()
    line.make()
    line.ask("2")
    read = line.executions.get("1")
    assert read is not None
    read.last_reader = time.monotonic() + IDLE_SECONDS
    assert line.serve(IDLE_SECONDS + 0.1) == []


def test_a_second_holder_makes_room_first() -> None:
    line = Line(most_sessions=5)
    line.ask("1")
    line.serve()
    [shared] = line.make(holders=2)
    line.ask("2")
    assert line.serve() == [("2",)]
    assert shared.held is not None
    assert len(shared.held.holders) == 1


def test_those_who_show_no_lsn_share_a_session() -> None:
    line = Line(most_sessions=4)
    line.ask("1", "2", shows_lsn=False)
    assert line.serve() == [("1", "2")]
    [pool] = line.make()
    assert pool.pool
    # Each has the snapshot of a statement of its own; while one is taken, others wait.
    line.ask("3", shows_lsn=False)
    assert line.serve() == []
    line.ask("4", shows_lsn=False)
    line.serve()
    assert pool.busy
    assert [line.shared(key) for key in "1234"] == [pool, pool, pool, None]
    pool.busy = False
    line.serve()
    assert line.shared("4") is pool
    # There is room for another one beside the pool, but not for two.
    line.ask("5")
    assert line.serve() == [("5",)]
    line.make()
    line.ask("6")
    assert line.serve() == []
    assert {execution.key for execution in line.executions.all()} == set("123456")


def read(line: Line, *keys: str) -> None:
    for key in keys:
        execution = line.executions.get(key)
        assert execution is not None
        execution.being_read = True


def test_what_is_read_for_longer_leaves_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    held = OpenSession()
    monkeypatch.setattr(
        Held, "add_holder", lambda self, options, name_for, id: self.holders.append(Holder(held, f"imported {id}"))
    )
    line = Line()
    line.ask("1", "2", "3", shows_lsn=False)
    line.serve()
    [pool] = line.make()
    pool.exported["3"] = "another"
    read(line, "1", "3")
    line.executions.take_out_of_pools(time.monotonic())
    assert line.workers.undone == []  # they may be over in a moment
    for _ in range(2):
        line.executions.take_out_of_pools(time.monotonic() + OWN_SECONDS + 0.1)
    assert len(line.workers.undone) == 2
    line.workers.finish()
    together, alone = line.shared("1"), line.shared("3")
    assert together is not None
    assert alone is not None
    assert line.shared("2") is together
    assert (together.keys, alone.keys) == (("1", "2"), ("3",))
    assert together.held is not None
    assert together.held.holders == [(held, "imported id")]
    # A pool that nobody needs any more is let go.
    assert pool.held is not None
    assert pool.held.holders == []


def test_what_cannot_leave_the_pool_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TransientError("too many clients")

    monkeypatch.setattr(Held, "add_holder", refuse)
    line = Line()
    line.ask("1", shows_lsn=False)
    line.serve()
    [pool] = line.make()
    read(line, "1")
    now = time.monotonic() + OWN_SECONDS + 0.1
    for later in (now, now + 2 * MEND_SECONDS):
        line.executions.take_out_of_pools(later)
        assert len(line.workers.undone) == 1
        line.workers.finish()
        assert line.shared("1") is pool
        # A server that refuses it is not asked at each look.
        line.executions.take_out_of_pools(time.monotonic())
        assert line.workers.undone == []
    # Where there is no room, it is not tried.
    line.executions.most_sessions = 4
    line.executions.take_out_of_pools(now + 4 * MEND_SECONDS)
    assert line.workers.undone == []


def two_in_a_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[Line, Shared]:
    """The first has its snapshot, and the second one's is being made."""
    monkeypatch.setattr(snapshots, "is_lost", lambda session: session.closed)
    line = Line()
    line.ask("1", shows_lsn=False)
    line.serve()
    [pool] = line.make()
    line.ask("2", shows_lsn=False)
    line.serve()
    assert line.shared("2") is pool
    return line, pool


def test_who_cannot_be_announced_in_a_pool_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TransientError("out of shared memory")

    line, pool = two_in_a_pool(monkeypatch)
    monkeypatch.setattr(snapshots, "export_snapshot", lambda _: "00000003-0000001B-2")
    monkeypatch.setattr(snapshots, "set_savepoint", lambda _: None)
    monkeypatch.setattr(snapshots, "announce_one_more", refuse)
    line.workers.finish()
    line.executions.mend()
    assert line.executions.get("2") is None
    assert str(line.marks.shown["2"]) == str(TransientError("out of shared memory"))
    assert line.shared("1") is pool
    assert pool.holding is not None


def test_a_pool_that_is_lost_takes_nobody_along_who_had_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise TransientError("server closed the connection")

    line, pool = two_in_a_pool(monkeypatch)
    monkeypatch.setattr(snapshots, "export_snapshot", refuse)
    line.workers.finish()
    line.executions.mend()
    assert line.executions.get("1") is None
    assert line.executions.tell_why_ended("1")
    assert type(line.marks.shown["1"]) is SnapshotLostError
    assert line.serve() == [("2",)]
    assert line.shared("2") is not pool


def test_whose_announcement_was_sent_has_no_other_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is lost before it has the answer: the server may have heard it, and tasks may read by it."""
    line, pool = two_in_a_pool(monkeypatch)
    assert pool.held is not None
    session: Any = pool.held.first.session

    def lose(*_: Any) -> None:
        session.close()
        raise TransientError("server closed the connection")

    monkeypatch.setattr(snapshots, "export_snapshot", lambda _: "00000003-0000001B-2")
    monkeypatch.setattr(snapshots, "set_savepoint", lambda _: None)
    monkeypatch.setattr(snapshots, "announce_one_more", lose)
    line.workers.finish()
    line.executions.mend()
    assert line.executions.get("2") is None
    assert line.executions.tell_why_ended("2")
    assert line.serve() == []


def test_a_server_that_is_away_is_asked_again_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, asked_again = TransientError("the database system is starting up"), ConnectError("it was asked again")
    errors = [starting, asked_again] * 2

    def refuse(*_: Any, **__: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(connection, "_connect_once", refuse)
    line = Line()
    line.ask("1", shows_lsn=False)
    line.ask("2")
    line.serve()
    line.workers.finish()
    assert line.marks.shown == {"1": asked_again, "2": asked_again}


def test_an_old_pool_takes_no_more_snapshots() -> None:
    line = Line(most_sessions=4)
    for key in ("1", "2"):
        line.ask(key, shows_lsn=False)
        line.serve()
        line.make()
    line.ask("3", shows_lsn=False)
    # The one that is there is old by then.
    assert line.serve(POOL_SECONDS + 0.1) == [("3",)]
    assert line.shared("3") is not line.shared("2")


def test_pools_hold_so_many_locks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "POOL_SNAPSHOTS", 2)
    monkeypatch.setattr(executions, "MOST_IN_POOLS", 3)
    line = Line()

    def ask(*keys: str) -> Shared:
        line.ask(*keys, shows_lsn=False)
        line.serve()
        [pool] = line.make()
        return pool

    first, second = ask("1", "2"), ask("3", "4")
    assert second is not first
    last = line.executions.get("4")
    assert last is not None
    # None of them while they may be read.
    line.executions.make_room(time.monotonic())
    assert len(line.executions) == 4
    last.last_reader = time.monotonic() + IDLE_SECONDS
    line.executions.make_room(time.monotonic() + IDLE_SECONDS + 0.1)
    assert {execution.key for execution in line.executions.all()} == {"3", "4"}
    assert first.held is not None
    assert first.held.holders == []
    assert line.executions.tell_why_ended("1")
    assert type(line.marks.shown["1"]) is SnapshotLostError


def test_one_snapshot_always_has_room() -> None:
    line = Line(most_sessions=1)
    line.ask("1")
    assert line.serve() == [("1",)]


def test_a_pool_leaves_room_for_a_snapshot_with_an_lsn() -> None:
    line = Line(most_sessions=3)
    line.ask("1", shows_lsn=False)
    line.serve()
    line.make()
    line.ask("2")
    assert line.serve() == [("2",)]


def test_waiting_in_line_is_bounded() -> None:
    line = Line(most_sessions=2)
    line.ask("1")
    line.serve()
    line.make()
    line.ask("2")
    read = line.executions.get("1")
    assert read is not None
    waits = line.executions.get("2")
    assert waits is not None
    read.last_reader = waits.last_reader = time.monotonic() + LINE_SECONDS
    line.serve(LINE_SECONDS + 1)
    assert line.executions.get("2") is None
    error = line.marks.shown["2"]
    assert type(error) is TransientError
    assert "600 s in line" in error.what
    assert "maxConnections" in error.remedy


def test_who_does_not_ask_any_more_is_not_in_line() -> None:
    line = Line(most_sessions=2)
    line.ask("1")
    line.serve()
    line.make()
    line.ask("2")
    read = line.executions.get("1")
    assert read is not None
    read.last_reader = time.monotonic() + GONE_SECONDS
    line.serve(GONE_SECONDS + 0.1)
    assert [execution.key for execution in line.executions.all()] == ["1"]
    assert not line.marks.shown


@pytest.mark.parametrize(
    ("connections", "planning", "kept", "keeper"), [(4, 1, 0, 3), (8, 2, 1, 5), (16, 4, 4, 8), (300, 4, 8, 288)]
)
def test_planning_and_keeper_have_the_connections_together(
    connections: int, planning: int, kept: int, keeper: int
) -> None:
    assert planning_share(connections) == planning
    assert kept_share(connections) == kept
    assert keeper_share(connections) == keeper
