"""What the catalog says of transactions that were more than 2^31 transactions ago: age() takes them for the newest."""

from __future__ import annotations

import contextlib

import aging
import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.attached import find_filled_partition, read_last_attached

pytestmark = [
    pytest.mark.corner,
    pytest.mark.skipif(aging.lacking() is not None, reason=str(aging.lacking())),
]


def filled(pg: Session, root: int, since: int) -> str:
    found = find_filled_partition(pg, root, since)
    assert found is not None
    assert found.how == "filled"
    return str(found.partition)


def test_partitions_are_noticed_however_long_ago_others_were_attached() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(aging.aging())
        with server.running() as url, connect(url) as pg:
            run(pg, "CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY LIST (id)",
                "CREATE TABLE first (LIKE r INCLUDING ALL)", "INSERT INTO first VALUES (1, 'a')",
                "ALTER TABLE r ATTACH PARTITION first FOR VALUES IN (1)",
                "CREATE TABLE archive (LIKE r INCLUDING ALL)", "INSERT INTO archive VALUES (2, 'b')")  # fmt: skip
            ((root, first),) = run(
                pg, "SELECT inhparent::bigint, xmin::text::bigint FROM pg_inherits WHERE inhrelid = 'first'::regclass"
            )
            assert read_last_attached(pg, [root]) == {root: first}
        server.move_on(3 << 29)
        server.move_on(5 << 29)
        with server.running() as url, connect(url) as pg:
            assert run(pg, "SELECT age(xmin) < 0 FROM pg_inherits WHERE inhrelid = 'first'::regclass") == [(True,)]
            assert read_last_attached(pg, [root]) == {root: 0}
            assert find_filled_partition(pg, root, 0) is None
            run(pg, "CREATE TABLE second (LIKE r INCLUDING ALL)", "INSERT INTO second VALUES (3, 'c')",
                "ALTER TABLE r ATTACH PARTITION second FOR VALUES IN (3)")  # fmt: skip
            second = read_last_attached(pg, [root])[root]
            assert second > 5 << 29
            assert filled(pg, root, 0) == "public.second"
            # All rows of this one are as old as the first partition.
            run(pg, "ALTER TABLE r ATTACH PARTITION archive FOR VALUES IN (2)")
            assert read_last_attached(pg, [root])[root] > second
            assert filled(pg, root, second) == "public.archive"
