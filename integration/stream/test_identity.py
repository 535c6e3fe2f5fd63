"""A replica identity that is changed while a stream reads the table: deletes would come with other columns."""

from __future__ import annotations

import logging

import pytest
from driving import Drive, run, values
from psycopg2.extensions import connection as Session

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, code int NOT NULL UNIQUE, v text)",
    "INSERT INTO t VALUES (1, 10, 'a'), (2, 20, 'b')",
)
# What is done, and the columns that the delete of the second row comes with.
CHANGES = {
    "another index": ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key", (None, 20, None)),
    "another primary key": ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (code, id)", (2, 20, None)),
    "full": ("ALTER TABLE t REPLICA IDENTITY FULL", (2, 20, "b")),
}


@pytest.mark.parametrize("options", [{"dbtable": "t"}, {"tables": "t"}], ids=["typed", "envelope"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_stream_stops_at_another_identity_and_goes_on_there(
    change: str, options: dict[str, str], pg: Session, drive: Drive
) -> None:
    alter, deleted = CHANGES[change]
    run(pg, *TABLE)
    driver = drive(**options)
    driver.take(2)
    run(pg, "DELETE FROM t WHERE id = 1", alter, "DELETE FROM t WHERE id = 2")
    driver.refusal("public.t: the replica identity was changed before the commit at ", "same checkpoint", rows=1)
    driver.restart()
    (row,) = driver.take(1)
    assert row["_change_type"] == "delete"
    if "dbtable" in options:
        assert values([row], "id", "code", "v") == [deleted]


def test_deletes_from_before_it_was_changed_while_the_query_was_down_are_logged(
    pg: Session, drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    run(pg, *TABLE)
    driver = drive(dbtable="t")
    driver.take(2)
    driver.stop()
    run(pg, "DELETE FROM t WHERE id = 1", CHANGES["another index"][0], "DELETE FROM t WHERE id = 2")
    with caplog.at_level(logging.WARNING):
        driver.start()
        assert values(driver.take(2), "id", "code") == [(1, None), (None, 20)]
    assert "public.t: the replica identity was changed after the commit at " in caplog.text
    assert "come with the columns id" in caplog.text
