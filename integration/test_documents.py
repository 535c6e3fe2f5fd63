"""The examples of the README and of docs/ run as they stand, page by page, on a real server and in Spark.

Only one thing in them is replaced: ``postgresql://ROLE@db.example.com/shop`` becomes the URL of a role of this kind in
the test's database. What a page's commands print is compared with what the page shows; there, ``…`` stands for any
text, and a number (a version, an LSN, a size) for any other.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from commands import COMMAND
from documents import PAGES, Block, blocks, name_of
from psycopg2 import sql
from psycopg2.extensions import connection as Session
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from roles import role
from sessions import SparkSessions
from watch import wait_until

URL = re.compile(r"postgresql://(\w+)@db\.example\.com/shop")
RUN = ("python", "sql", "console")
ORDERS = 100
NUMBER = r"\d[\d.,/A-F]*(?: (?:bytes|[kMGT]B))?"

# Relative paths are Spark's, in whose directory nothing may stay.
WRITTEN = (
    *("joined", "public.orders", "public.items", "orders", "states", "spark-warehouse"),
    *("log-checkpoint", "orders-checkpoint", "shop-checkpoint", "states-checkpoint", "lake", "lake-checkpoint"),
)

SHOP = f"""
CREATE TABLE orders (
  order_id bigint PRIMARY KEY,
  status text NOT NULL,
  amount numeric(10, 2) NOT NULL,
  placed_at timestamptz NOT NULL
);
CREATE TABLE items (
  order_id bigint REFERENCES orders,
  line int,
  product text NOT NULL,
  PRIMARY KEY (order_id, line)
);
INSERT INTO orders
SELECT i, CASE i % 3 WHEN 0 THEN 'paid' ELSE 'new' END, i * 1.5, now()
FROM generate_series(1, {ORDERS}) AS i;
INSERT INTO items
SELECT i, line, 'product ' || i % 7
FROM generate_series(1, {ORDERS}) AS i, generate_series(1, 2) AS line;
"""

Logins = Mapping[str, Mapping[str, str]]


@pytest.fixture
def logins(db: str, pg: Session) -> Iterator[Logins]:
    """The roles of the pages: one that may read, one that may stream, one that has just come."""
    with contextlib.ExitStack() as stack:
        found = {
            name: stack.enter_context(role(pg, db, *attributes))
            for name, attributes in {"reader": ["REPLICATION"], "streamer": ["REPLICATION"], "newcomer": []}.items()
        }
        streamer = sql.Identifier(found["streamer"]["user"])
        with pg.cursor() as cursor:
            cursor.execute(SHOP)
            for name in ("reader", "newcomer"):
                grant = sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}")
                cursor.execute(grant.format(sql.Identifier(found[name]["user"])))
            for table in ("orders", "items"):
                cursor.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(sql.Identifier(table), streamer))
            database = sql.Identifier(found["streamer"]["dbname"])
            cursor.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, streamer))
        yield found


@pytest.fixture
def _nothing_left(pg: Session, spark: SparkSession, spark_sessions: SparkSessions) -> Iterator[None]:
    yield
    for table in spark.catalog.listTables():
        spark.sql(f"DROP {'VIEW' if table.isTemporary else 'TABLE'} {table.name}")
    for name in WRITTEN:
        shutil.rmtree(spark_sessions.scratch / name, ignore_errors=True)
    wait_until(lambda: not slots(pg, "active"))
    with pg.cursor() as cursor:
        cursor.execute("SELECT pg_drop_replication_slot(slot) FROM unnest(%s::name[]) AS slot", (slots(pg),))


def slots(pg: Session, condition: str = "true") -> list[str]:
    with pg.cursor() as cursor:
        cursor.execute(
            f"SELECT slot_name FROM pg_replication_slots WHERE database = current_database() AND {condition}"
        )
        return [slot for (slot,) in cursor]


def with_logins(text: str, logins: Logins) -> str:
    def url(found: re.Match[str]) -> str:
        login = logins[found[1]]
        user, password = login["user"], quote(login["password"])
        return f"postgresql://{user}:{password}@{login['host']}:{login['port']}/{login['dbname']}"

    return URL.sub(url, text)


def end(query: StreamingQuery) -> None:
    """End a query when it has everything that there is."""
    query.processAllAvailable()
    query.stop()


def run_python(text: str, namespace: dict[str, object], spark: SparkSession) -> None:
    """Run a block; the queries that it starts, or waits for, are ended when they have everything that there is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StreamingQuery, "awaitTermination", end)
        exec(compile(text, "example", "exec"), namespace)  # noqa: S102 - what the pages show is what is tested
    for query in spark.streams.active:
        end(query)


def run_console(block: str, logins: Logins, directory: Path) -> None:
    """Run a block's command in a directory without a checkout; it prints what the block shows."""
    command, *shown = block.splitlines()
    program, *arguments = shlex.split(with_logins(command.removeprefix("$ "), logins))
    assert program == "pg-cdc"
    result = subprocess.run(
        [COMMAND, *arguments],
        cwd=directory,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    wrong = any(line.startswith("wrong ") for line in shown)
    assert (result.returncode, result.stderr) == (int(wrong), ""), result.stdout
    printed = result.stdout
    for name, login in logins.items():
        printed = printed.replace(f"{login['host']}:{login['port']}/{login['dbname']}", "db.example.com/shop")
        printed = printed.replace(login["user"], name).replace(login["dbname"], "shop")
    assert re.fullmatch(_pattern(shown), _without_layout(printed)), printed


def _without_layout(text: str) -> str:
    """A text with single spaces and without rules: columns are as wide as what is in them."""
    lines = (re.sub(r"[─\s]+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _pattern(shown: list[str]) -> str:
    parts = re.split(f"(…|{NUMBER})", _without_layout("\n".join(shown)))
    return "".join("(?s:.*)" if part == "…" else NUMBER if part[:1].isdigit() else re.escape(part) for part in parts)


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in RUN]


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_examples_of_a_page_run(
    page: Path, logins: Logins, pg: Session, spark: SparkSession, tmp_path: Path
) -> None:
    namespace: dict[str, object] = {"spark": spark}
    for block in runnable(page):
        if block.language == "python":
            run_python(with_logins(block.text, logins), namespace, spark)
            continue
        wait_until(lambda: not slots(pg, "active"))
        if block.language == "console":
            run_console(block.text, logins, tmp_path)
        else:
            with pg.cursor() as cursor:
                cursor.execute(block.text)
    written = {table.name for table in spark.catalog.listTables()}
    if "orders_log" in written:
        assert spark.table("orders_log").count() == ORDERS
    if "changes" in written:
        rows = spark.table("changes").where("_table = 'public.orders' AND _change_type = 'snapshot'")
        assert rows.count() == ORDERS


def test_every_command_that_is_shown_is_run() -> None:
    """A command of pg-cdc stands in a block of this kind, but for what starts servers or Spark: that has own tests."""
    elsewhere = ("pg-cdc bench", "pg-cdc demo", "$ pg-cdc mirror", "$ pg-cdc adopt")
    shown = [
        line
        for page in PAGES
        for block in blocks(page)
        if block.language != "console"
        for line in block.text.splitlines()
    ]
    assert [line for line in shown if line.startswith(("pg-cdc", "$ pg-cdc")) and not line.startswith(elsewhere)] == []
