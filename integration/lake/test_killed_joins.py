"""Tables come again under load, and processes end before the lake has their batches: it is PostgreSQL's each time."""

from __future__ import annotations

import random
import threading

import pytest
from databases import connect
from driving import run
from joining_late import hold_joins_back
from lake import Begin, is_same, set_aside
from psycopg2.extensions import connection as Session
from threads import at_work
from watch import wait_until

from pg_cdc_source.protocol.decoding_messages import Asked, write_request

ROUNDS, BATCHES, HELD_BACK, KEYS = 3, 10, 4, 40
IDENTITIES = {"by_key": "DEFAULT", "by_row": "FULL"}


def test_tables_come_again_under_load(pg: Session, db: str, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is ahead of the consistent points, as where changes come fast and rows slowly."""
    if pg.server_version < 140000:
        pytest.skip("PostgreSQL 14 has messages")
    lake = begin(*(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)" for table in IDENTITIES))
    for table, identity in IDENTITIES.items():
        run(pg, f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
            f"INSERT INTO {table} SELECT i, 0 FROM generate_series(1, {KEYS // 2}) AS i")  # fmt: skip
    wait_until(is_same(lake, pg, *IDENTITIES))
    chance, late = random.Random(0), hold_joins_back(monkeypatch)
    asked = write_request(Asked(tuple(f"public.{table}" for table in IDENTITIES)))

    def write(stop: threading.Event) -> None:
        dice = random.Random(0)
        with connect(db) as session:
            while not stop.wait(0.002):
                table, key = dice.choice(list(IDENTITIES)), dice.choice((-1, 1)) * dice.randint(1, KEYS)
                run(session, dice.choice([
                    f"INSERT INTO {table} VALUES ({key}, {key}) ON CONFLICT (id) DO UPDATE SET v = {table}.v + 1",
                    f"UPDATE {table} SET v = v + 1 WHERE id = {key}", f"DELETE FROM {table} WHERE id = {key}",
                    f"UPDATE {table} AS t SET id = -id"
                    f" WHERE id = {key} AND NOT EXISTS (SELECT FROM {table} AS u WHERE u.id = -t.id)",
                ]))  # fmt: skip

    for _ in range(ROUNDS):
        with at_work(write):
            run(pg, f"SELECT pg_logical_emit_message(true, 'pgcdc', '{asked}')")
            late.clear()
            for number in range(BATCHES):
                if number == HELD_BACK:
                    late.set()
                if chance.random() < 0.5:
                    # The process ends before the lake has the batch.
                    lake.driver.attempt()
                    lake.driver.restart()
                lake.step()
        wait_until(is_same(lake, pg, *IDENTITIES))
        assert set_aside(lake) == {}
