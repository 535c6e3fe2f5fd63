"""What a server is too old for is refused, and works from the version on that has it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest
from driving import Drive, driving, run, values
from psycopg2.extensions import connection as Session


@pytest.fixture
def drive(db: str, pg: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    with driving(pg, db, monkeypatch) as drive:
        yield drive


@pytest.mark.matrix("row filters, column lists, publications of schemas", since="PostgreSQL 15")
def test_parts_of_tables_and_whole_schemas_are_published_from_15_on(pg: Session, drive: Drive) -> None:
    part = "CREATE PUBLICATION s FOR TABLE t (id, v) WHERE (id < 100)"
    schema = "CREATE PUBLICATION whole FOR TABLES IN SCHEMA public"
    run(
        pg,
        "CREATE TABLE t (id int PRIMARY KEY, secret text, v text)",
        "INSERT INTO t SELECT i, 'secret', 'v' || i FROM generate_series(98, 102) AS i",
    )
    if pg.server_version < 150000:
        for publication in (part, schema):
            with pytest.raises(psycopg2.errors.SyntaxError):
                run(pg, publication)
        return
    run(pg, part, schema)
    driver = drive(dbtable="t")
    assert sorted(values(driver.take(2), "_change_type", "id", "v")) == [
        ("snapshot", 98, "v98"),
        ("snapshot", 99, "v99"),
    ]
    run(pg, "INSERT INTO t VALUES (1, 'secret', 'new'), (103, 'secret', 'not')", "UPDATE t SET id = 200 WHERE id = 98")
    assert values(driver.take(2), "_change_type", "id", "v") == [("insert", 1, "new"), ("delete", 98, None)]
    assert not any("secret" in row for row in driver.rows)
    driver.stop()
    driver = drive(tables="public.*", publication="whole", slot="whole")
    assert len(driver.take(7)) == 7
    run(pg, "DELETE FROM t WHERE id = 200")
    assert values(driver.take(1), "_table", "_change_type", "key") == [("public.t", "delete", '{"id":200}')]
