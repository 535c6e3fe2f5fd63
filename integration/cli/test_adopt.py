"""``pg-cdc adopt``: a mirror goes on after a real pg_upgrade, without reading its tables again."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import upgraded
from commands import pg_cdc
from databases import connect
from driving import run
from lake import Rows, rows_of, rows_of_lake
from pyspark.sql import SparkSession

from pg_cdc_source import mirror, mirror_at
from pg_cdc_source.lake.sink import Applied

TABLES = ("orders", "parts", "full_rows")
ROWS = 2000
SLOTS_ARE_KEPT = 170000
Take = Callable[[str], list[Applied]]
# As in docs/operations.md.
SHOWN = r"""checkpoint  batch \d+, read up to \S+ of server \d+
server      \d+, from \S+ on
go on       public.orders
come again  public.full_rows
are gone    public.parts
The query goes on from \S+, with the same checkpoint.
"""

pytestmark = pytest.mark.skipif(upgraded.lacking() is not None, reason=upgraded.lacking() or "")


@pytest.fixture
def take(spark: SparkSession, tmp_path: Path) -> Take:
    """Mirror what a server has, and end; the batches."""

    def take(url: str) -> list[Applied]:
        batches: list[Applied] = []
        target, checkpoint = f"{tmp_path}/lake/{{table}}", f"{tmp_path}/checkpoint"
        given: dict[str, Any] = {"tables": "public.*", "slot": "s", "target": target, "checkpoint": checkpoint}
        mirror(spark, url=url, **given, once=True, on_batch=batches.append).awaitTermination()
        return batches

    return take


@pytest.fixture
def servers() -> Iterator[upgraded.Upgradable]:
    with upgraded.upgradable() as servers:
        yield servers


def adopt(url: str, directory: Path, *more: str) -> Any:
    done = pg_cdc("adopt", url, "--slot", "s", "--checkpoint", f"{directory}/checkpoint", "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(url: str, directory: Path) -> str:
    done = pg_cdc("adopt", url, "--slot", "s", "--checkpoint", f"{directory}/checkpoint")
    assert done.returncode == 1, done.stdout
    return done.stderr


def in_lake(directory: Path) -> list[Rows]:
    return [rows_of_lake(f"{directory}/lake/{table}") for table in TABLES]


def test_a_mirror_goes_on_after_an_upgrade(
    spark: SparkSession, take: Take, servers: upgraded.Upgradable, tmp_path: Path
) -> None:
    with servers.running("old") as url, connect(url) as pg:
        run(
            pg,
            "CREATE TYPE mood AS ENUM ('good', 'bad')",
            "CREATE TABLE orders (id bigint PRIMARY KEY, note text, mood mood, gone int)",
            f"INSERT INTO orders SELECT i, repeat('x', 3000), 'good', i FROM generate_series(1, {ROWS}) AS i",
            "ALTER TABLE orders DROP COLUMN gone",
            "ALTER TABLE orders ADD COLUMN price numeric(10, 2) DEFAULT 1.25",
            "CREATE TABLE parts (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)",
            "CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
            f"INSERT INTO parts SELECT i, '2026-01-01' FROM generate_series(1, {ROWS}) AS i",
            "CREATE TABLE full_rows (a int PRIMARY KEY, b text)",
            "ALTER TABLE full_rows REPLICA IDENTITY FULL",
            f"INSERT INTO full_rows SELECT i, 'b' FROM generate_series(1, {ROWS}) AS i",
            # Its rows stand in another file than its oid says, which would be a rewrite where columns are altered, too.
            "VACUUM FULL orders",
        )
        take(url)
        run(pg, "UPDATE orders SET mood = 'bad' WHERE id < 10", "DELETE FROM full_rows WHERE a = 3")
        assert "the stream has not read 2 transactions after" in refusal(url, tmp_path)
        lsn = take(url)[-1].row.lsn
        assert adopt(url, tmp_path)["unread"] == 0
        # What tells the stream of a gap does not outlast the upgrade.
        run(pg, "ALTER PUBLICATION s DROP TABLE parts", "ALTER PUBLICATION s ADD TABLE parts")
        assert "has public.parts anew" in refusal(url, tmp_path)
        take(url)
        assert adopt(url, tmp_path)["unread"] == 0
        before = [rows_of(pg, table) for table in TABLES]
        assert in_lake(tmp_path) == before
        if pg.server_version < SLOTS_ARE_KEPT:
            run(pg, "SELECT pg_drop_replication_slot('s')")
        else:
            # pg_upgrade refuses a slot that has not confirmed what the stream has read.
            run(pg, "SELECT pg_replication_slot_advance('s', pg_current_wal_flush_lsn())")
    with servers.running("new") as url:
        # Which of them depends on how much WAL initdb has written.
        assert re.search("positions would go back|publication s does not exist", refusal(url, tmp_path))
    servers.upgrade()
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    with servers.running("new") as url, connect(url) as pg:
        # What it was altered to before anybody follows it is not known, so its rows come again.
        run(pg, "ALTER TABLE parts ADD COLUMN more int DEFAULT 3")
        found = adopt(url, tmp_path)
        assert (found["again"], found["gone"], found["written"]) == (["public.parts"], [], [])
        run(
            pg,
            "UPDATE orders SET price = 2 WHERE id < 5",
            "DELETE FROM parts WHERE id = 1",
            "ALTER TABLE full_rows ADD COLUMN c int DEFAULT 4",
            "INSERT INTO full_rows VALUES (0, 'b', 5)",
            "UPDATE full_rows SET a = -a WHERE a = 2",
        )
        batches = take(url)
        assert in_lake(tmp_path) == [rows_of(pg, table) for table in TABLES]
        assert not batches[-1].row.set_aside
        rows = sum((Counter(batch.rows) for batch in batches), Counter())
        assert 0 < rows["public.orders"] + rows["public.full_rows"] < 20, "tables were read again"
        then = mirror_at(spark, f"{tmp_path}/lake/_pgcdc", lsn=lsn)
        assert then["public.orders"].where("mood = 'bad' AND price = 1.25").count() == 9
        assert adopt(url, tmp_path)["unread"] == 0
        # A checkpoint from before, after all that was written without a slot.
        run(pg, "SELECT pg_drop_replication_slot('s')", "ALTER PUBLICATION s DROP TABLE parts")
        shutil.rmtree(tmp_path / "checkpoint")
        (tmp_path / "copy").rename(tmp_path / "checkpoint")
        done = pg_cdc("adopt", url, "--slot", "s", "--checkpoint", f"{tmp_path}/checkpoint")
        assert re.fullmatch(SHOWN, done.stdout), done
        assert re.search(r"public\.orders, .*public\.full_rows: rows were written", done.stderr), done
