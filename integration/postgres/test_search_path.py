"""Statements of this package call nothing but PostgreSQL's own, whatever the role's search_path would find first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import psycopg2
import pytest
from commands import pg_cdc
from databases import Databases, connect
from driving import Driver, Row, driving, kinds, run, values
from hostile import make_hostile
from psycopg2.extensions import connection as Session
from psycopg2.extensions import make_dsn

from pg_cdc_source import open_snapshot
from pg_cdc_source.errors import DefiniteError
from pg_cdc_source.options.snapshot_options import parse_snapshot_options
from pg_cdc_source.snapshot.reader import read_range
from pg_cdc_source.snapshot.scan import make_plan
from pg_cdc_source.snapshot.source import plan_ranges

TABLES = (
    "CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE DOMAIN short AS varchar(9)",
    "CREATE TABLE t (id int PRIMARY KEY, m mood, s short, a int[], r regclass, c mood[])",
    "CREATE TABLE f (id int, a int[], m mood); ALTER TABLE f REPLICA IDENTITY FULL",
    "INSERT INTO f SELECT i, ARRAY[i % 2, 2], 'sad' FROM generate_series(1, 9) AS i",
    "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (500)",
    "CREATE TABLE p2 PARTITION OF p DEFAULT",
    "INSERT INTO t SELECT i, 'sad', 's', ARRAY[i, 2], 't', '{glad}' FROM generate_series(1, 9) AS i",
    "INSERT INTO p SELECT i, 'v' FROM generate_series(1, 999) AS i",
    # As its body names a table without a schema, it needs the role's search_path; SQL, so that planning looks into it.
    "CREATE FUNCTION count_of_p() RETURNS int STABLE LANGUAGE sql AS 'SELECT pg_catalog.count(*)::int4 FROM p'",
    "CREATE VIEW v AS SELECT id, count_of_p() AS n FROM t",
    # So do bodies that it looks into while it plans a table.
    "CREATE FUNCTION helper(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1'",
    "CREATE FUNCTION wrap(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT helper($1)'",
    "CREATE TABLE l (id int, v text) PARTITION BY LIST (wrap(v)); ALTER TABLE l REPLICA IDENTITY FULL",
    "CREATE TABLE l1 PARTITION OF l FOR VALUES IN ('a'); ALTER TABLE l1 REPLICA IDENTITY FULL",
    "INSERT INTO l VALUES (1, 'a')",
    # A value is what its output function prints, whatever casts there are.
    "CREATE FUNCTION text_of(mood) RETURNS text LANGUAGE plpgsql AS $f$BEGIN RETURN 'cast'; END$f$",
    "CREATE CAST (mood AS text) WITH FUNCTION text_of(mood)",
)
STATISTICS, INDEX = "CREATE STATISTICS s ON (wrap(v)), id FROM l1", "CREATE INDEX ON l1 (wrap(v))"


@pytest.fixture(scope="module", params=["hostile,public", "hostile,public,pg_catalog"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill(db: str, path: str) -> str:
    """Make TABLES in a database; its URL for a session whose search_path begins with a hostile schema."""
    with connect(db) as pg:
        run(pg, *TABLES)
        if pg.server_version >= 140000:
            run(pg, STATISTICS)
        # From then on, PostgreSQL makes no such index.
        if pg.server_version < 170000:
            run(pg, INDEX)
        assert make_hostile(pg) > 1000
    url = str(make_dsn(db, options=f"-csearch_path={path}"))
    with connect(url) as session, pytest.raises(psycopg2.Error, match="hostile"):
        run(session, "SELECT array_agg(relname) FROM pg_class")
    return url


@pytest.fixture(scope="module")
def read_url(server: str, databases: Callable[[str], Databases], path: str) -> Iterator[str]:
    """Of a database for all tests that only read."""
    with databases(server).one() as db:
        yield fill(db, path)


@pytest.fixture
def url(db: str, path: str) -> str:
    """Of a database of the test's own."""
    return fill(db, path)


def snapshot(url: str, **options: str) -> list[Row]:
    with open_snapshot(url=url, tables=["t", "p", "v", "l"]) as opened:
        parsed = parse_snapshot_options({**opened.options, **options})
        plan = make_plan(parsed)
        source, ranges = plan_ranges(plan, parsed)
        batches = [batch for scan_range in ranges for batch in read_range(plan, source, scan_range, "test")]
    return [row for batch in batches for row in batch.to_pylist()]


T = {"m": "sad", "s": "s", "r": "t", "c": ["glad"]}


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        # The names of a type and of a regclass are the role's.
        ({"dbtable": "t"}, [{"id": i, "a": [i, 2], **T} for i in range(1, 10)]),
        ({"dbtable": "t", "where": "id = 3"}, [{"id": 3, "a": [3, 2], **T}]),
        ({"dbtable": "p", "numPartitions": "3"}, [{"id": i, "v": "v"} for i in range(1, 1000)]),
        ({"dbtable": "v"}, [{"id": i, "n": 999} for i in range(1, 10)]),
        ({"dbtable": "v", "where": "id <= 2"}, [{"id": 1, "n": 999}, {"id": 2, "n": 999}]),
        ({"dbtable": "l"}, [{"id": 1, "v": "a"}]),
        ({"query": "SELECT id, r FROM t WHERE id = 1"}, [{"id": 1, "r": "t"}]),
    ],
)
def test_a_snapshot_calls_nothing_but_postgresqls_own(
    read_url: str, path: str, options: dict[str, str], rows: Sequence[Row]
) -> None:
    if path.endswith("pg_catalog") and not options.keys() <= {"dbtable", "numPartitions"}:
        # The user's own SQL calls what is hostile.
        with pytest.raises(DefiniteError, match="hostile"):
            snapshot(read_url, **options)
        return
    assert sorted(snapshot(read_url, **options), key=lambda row: row["id"]) == rows


@pytest.fixture
def driver(pg: Session, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if pg.server_version >= 150000:
        # The rows of a snapshot are chosen by the text of the row filter: one and two.
        filtered = "f WHERE (a @> ARRAY[id])"
        run(pg, f"CREATE PUBLICATION s FOR TABLE t, l, {filtered}, p WITH (publish_via_partition_root)")
    else:
        run(pg, "DELETE FROM f WHERE id > 2")
    with driving(pg, url, monkeypatch) as drive:
        yield drive(tables="t,f,p,l", onSchemaChange="emit")


INITIAL = 4 + 9 + 2 + 999 + 1  # the schemas first


def test_a_stream_calls_nothing_but_postgresqls_own(pg: Session, driver: Driver) -> None:
    driver.take(INITIAL)
    run(pg, "ALTER TABLE t ADD d regclass DEFAULT 'p'", "UPDATE t SET s = 'u' WHERE id = 1",
        "ALTER TABLE t RENAME s TO w", "INSERT INTO t (id, m, a, d) VALUES (10, 'glad', '{10}', 'p')",
        "TRUNCATE p")  # fmt: skip
    driver.restart()
    rows = driver.take(5)
    assert kinds(rows) == ["schema", "update", "schema", "insert", "truncate"]
    first, _, _, last, _ = (after for (after,) in values(rows, "after"))
    # What old rows have is what the server prints for new ones.
    assert ('"fill":"p"' in first, '"type":"mood"' in first, '"d":"p"' in last) == (True, True, True), (first, last)


def test_commands_call_nothing_but_postgresqls_own(pg: Session, driver: Driver) -> None:
    url = driver.options["url"]
    driver.take(INITIAL)
    driver.stop()
    for command in (
        ("check", "pgsnapshot", "-o", f"url={url}", "-o", "dbtable=t"),
        ("check", "pgcdc", "-o", f"url={url}", "-o", "slot=s", "-o", "tables=t,f,p,l", "-o", "startFrom=slot"),
        ("slots", url),
        *([("resnapshot", url, "--slot", "s", "--table", "t")] if pg.server_version >= 140000 else []),
    ):
        result = pg_cdc(*command)
        assert (result.returncode, "hostile" in result.stdout + result.stderr) == (0, False), (command, result)


def test_the_search_path_is_what_a_session_has_when_it_is_opened(pg: Session, db: str) -> None:
    if pg.server_version < 170000:
        pytest.skip("PostgreSQL 17 has event triggers on login")
    run(pg, "CREATE SCHEMA app; CREATE TABLE app.t AS SELECT 1 AS id; CREATE TABLE public.t AS SELECT 99 AS id",
        "CREATE FUNCTION choose() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $f$BEGIN PERFORM set_config('search_path', 'app,public', false); END$f$",
        "CREATE EVENT TRIGGER choose ON login EXECUTE FUNCTION choose()")  # fmt: skip
    with open_snapshot(url=db, tables=["t"]) as opened:
        for options in ({"dbtable": "t"}, {"query": "SELECT id FROM t"}):
            parsed = parse_snapshot_options({**opened.options, **options})
            plan = make_plan(parsed)
            source, [scan_range] = plan_ranges(plan, parsed)
            assert [batch.to_pylist() for batch in read_range(plan, source, scan_range, "test")] == [[{"id": 1}]]


def test_a_table_of_the_catalog_is_locked_and_not_its_namesake(pg: Session, db: str) -> None:
    run(pg, "CREATE TABLE public.pg_am (id int)")
    locked = "SELECT relation::regclass::text FROM pg_locks WHERE pid <> pg_backend_pid() AND relation IN"
    with open_snapshot(url=make_dsn(db, options="-csearch_path=public,pg_catalog"), tables=["pg_catalog.pg_am"]):
        assert run(pg, f"{locked} ('public.pg_am'::regclass, 'pg_catalog.pg_am'::regclass)") == [("pg_am",)]
