"""What the server refuses a table that joins: what may pass is waited for, and the other tables go on meanwhile."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg2
import pytest
from databases import connect
from driving import Driver, driving, run, values
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn
from psycopg2.extras import LogicalReplicationConnection
from roles import role
from servers import second_server
from watch import wait_until

from pg_cdc_source.errors import AccessError
from pg_cdc_source.postgres.backoff import Backoff
from pg_cdc_source.stream import joining

CREATE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "INSERT INTO t VALUES (1, 'a')",
    "CREATE TABLE u (id int PRIMARY KEY, v text)",
    "INSERT INTO u VALUES (1, 'a')",
    "CREATE PUBLICATION s FOR TABLE t",
)
JOIN = "ALTER PUBLICATION s ADD TABLE u"


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "AGAIN", Backoff(0.2, longest_seconds=0.5))


@contextmanager
def no_slot(url: str, pg: Session) -> Iterator[None]:
    run(pg, "SELECT pg_create_physical_replication_slot('full')")
    yield
    run(pg, "SELECT pg_drop_replication_slot('full')")


@contextmanager
def no_walsender(url: str, pg: Session) -> Iterator[None]:
    with contextlib.closing(psycopg2.connect(url, connection_factory=LogicalReplicationConnection)):
        yield


def joins_after(driver: Driver, pg: Session, full: AbstractContextManager[None], waits: Callable[[], bool]) -> None:
    """u waits to join while ``full`` lasts, and t goes on."""
    driver.take(1)
    wait_until(lambda: run(pg, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's' AND active"))
    with full:
        run(pg, JOIN)
        wait_until(lambda: (driver.batch(), waits())[1])
        run(pg, "INSERT INTO t VALUES (2, 'b')", "INSERT INTO u VALUES (2, 'b')")
        assert values(driver.take(1), "_table") == [("public.t",)]
        # The slot does not wait with it.
        ((lsn,),) = run(pg, "SELECT pg_current_wal_lsn() - '0/0'")
        keys = itertools.count(3)

        def is_confirmed() -> bool:
            run(pg, f"INSERT INTO t VALUES ({next(keys)}, 'c')")
            driver.batch()
            confirmed = "SELECT confirmed_flush_lsn - '0/0' > {} FROM pg_replication_slots WHERE slot_name = 's'"
            return run(pg, confirmed.format(lsn)) == [(True,)]

        wait_until(is_confirmed)
    seen = len(driver.rows)
    wait_until(lambda: (driver.batch(), sum(row["_table"] == "public.u" for row in driver.rows) == 3)[1])
    rows = values([row for row in driver.rows[seen:] if row["_table"] == "public.u"], "_change_type")
    assert sorted(rows) == [("snapshot",), ("snapshot",), ("truncate",)]


@pytest.mark.parametrize(
    ("full", "setting", "said"),
    [
        (no_slot, "max_replication_slots", "all replication slots are in use"),
        (no_walsender, "max_wal_senders", "number of requested standby connections exceeds"),
    ],
    ids=["slots", "walsenders"],
)
def test_a_full_server_lets_a_table_wait(
    full: Callable[[str, Session], AbstractContextManager[None]],
    setting: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with second_server({setting: "2"}) as url, connect(url) as pg, driving(pg, url, monkeypatch) as drive:
        run(pg, *CREATE)
        waiting = "tables that join the stream have to wait: "
        driver = drive(tables="public.*")
        joins_after(driver, pg, full(url, pg), lambda: said in caplog.text and waiting in caplog.text)
        assert f"Remedy: raise {setting}" in caplog.text


def test_a_role_that_has_lost_replication_lets_a_table_wait(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, *CREATE)
    with streamer(pg, db, monkeypatch) as (drive, name):

        @contextmanager
        def forbidden() -> Iterator[None]:
            run(pg, f"ALTER ROLE {name} NOREPLICATION")
            yield
            run(pg, f"ALTER ROLE {name} REPLICATION")

        driver = drive(tables="public.*")
        joins_after(driver, pg, forbidden(), lambda: "which role" in caplog.text)
        assert f"Remedy: ALTER ROLE {name} REPLICATION" in caplog.text


def test_a_table_that_the_role_may_not_read_ends_the_query(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pg, *CREATE)
    with streamer(pg, db, monkeypatch) as (drive, name):
        driver = drive(tables="public.*")
        driver.take(1)
        run(pg, f"REVOKE SELECT ON u FROM {name}", JOIN)
        for _ in range(2):
            driver.refusal("public.u", "permission denied", "GRANT SELECT", kind=AccessError)
            driver.restart()
        run(pg, f"GRANT SELECT ON u TO {name}")
        assert values(driver.take(2), "_table") == [("public.u",)] * 2


def test_a_query_that_stops_while_a_table_waits_says_nothing_of_it(
    pg: Session, db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, *CREATE)
    with streamer(pg, db, monkeypatch) as (drive, _), connect(db) as writer:
        driver = drive(tables="public.*")
        driver.take(1)
        run(writer, "BEGIN; INSERT INTO u VALUES (2, 'b')")
        run(pg, JOIN)
        wait_until(lambda: (driver.batch(), run(pg, "SELECT 1 FROM pg_replication_slots WHERE temporary"))[1])
        driver.stop()
    assert "have to wait" not in caplog.text


@contextmanager
def streamer(pg: Session, db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[..., Driver], str]]:
    """Streams of a role of its own, and its name."""
    with role(pg, db, "REPLICATION") as login, driving(pg, make_dsn(**login), monkeypatch) as drive:
        run(pg, f"GRANT SELECT ON t, u TO {login['user']}")
        yield drive, login["user"]
