"""What the catalog says of transactions that were more than 2^31 transactions ago: age() takes them for the newest."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import aging
import pytest
from databases import connect
from driving import run
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres.attached import Attachments, find_filled_partition, read_attachments

NONE = Attachments("0", 3)
# Behind those that a new cluster's own are.
FIRST_OF_NEXT_EPOCH = 1_000_000

pytestmark = [
    pytest.mark.corner,
    pytest.mark.skipif(aging.lacking() is not None, reason=str(aging.lacking())),
]


def filled(pg: Session, root: int, earlier: Attachments) -> str:
    found = find_filled_partition(pg, root, earlier)
    assert found is not None
    assert found.how == "filled"
    return str(found.partition)


def test_partitions_are_noticed_however_long_ago_others_were_attached() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(aging.aging())
        with server.running() as url, connect(url) as pg, connect(url) as older:
            run(older, "BEGIN", "SELECT txid_current()")
            run(pg, "CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY LIST (id)",
                "CREATE TABLE first (LIKE r INCLUDING ALL)", "INSERT INTO first VALUES (1, 'a')",
                "ALTER TABLE r ATTACH PARTITION first FOR VALUES IN (1)",
                "CREATE TABLE archive (LIKE r INCLUDING ALL)", "INSERT INTO archive VALUES (2, 'b')")  # fmt: skip
            ((root,),) = run(pg, "SELECT 'r'::regclass::oid::bigint")
            first = read_attachments(pg, [root])[root]
            assert filled(pg, root, NONE) == "public.first"
            # The older transaction may attach one as well; this one is known.
            assert len(first.recent) == 1
            assert find_filled_partition(pg, root, first) is None
            assert filled(pg, root, replace(first, recent=())) == "public.first"
        server.move_on(3 << 29)
        server.move_on(5 << 29)
        with server.running() as url, connect(url) as pg:
            assert run(pg, "SELECT age(xmin) < 0 FROM pg_inherits WHERE inhrelid = 'first'::regclass") == [(True,)]
            assert read_attachments(pg, [root])[root] == first
            # An older release said so behind 2^31 transactions.
            assert find_filled_partition(pg, root, Attachments.parse("0")) is None
            before = read_attachments(pg, [root])[root]
            run(pg, "CREATE TABLE second (LIKE r INCLUDING ALL)", "INSERT INTO second VALUES (3, 'c')",
                "ALTER TABLE r ATTACH PARTITION second FOR VALUES IN (3)")  # fmt: skip
            second = read_attachments(pg, [root])[root]
            assert second.may_have_more_than(before)
            assert filled(pg, root, before) == "public.second"
            assert filled(pg, root, Attachments.parse("0")) == "public.second"
            # All rows of this one are as old as the first partition.
            run(pg, "ALTER TABLE r ATTACH PARTITION archive FOR VALUES IN (2)")
            third = read_attachments(pg, [root])[root]
            assert third.may_have_more_than(second)
            assert filled(pg, root, second) == "public.archive"
            run(pg, "CREATE TABLE fourth (LIKE r INCLUDING ALL)", "INSERT INTO fourth VALUES (4, 'd')")
        server.move_on(7 << 29)
        # The ids begin anew, and that of the first partition is the next one's again.
        server.move_on(FIRST_OF_NEXT_EPOCH, epoch=1)
        with server.running() as url, connect(url) as pg:
            before = read_attachments(pg, [root])[root]
            assert before == third
            run(pg, "ALTER TABLE r DETACH PARTITION second")
            detached = read_attachments(pg, [root])[root]
            assert detached.may_have_more_than(before)
            assert find_filled_partition(pg, root, before) is None
            run(pg, "ALTER TABLE r ATTACH PARTITION fourth FOR VALUES IN (4)")
            assert read_attachments(pg, [root])[root].may_have_more_than(detached)
            assert filled(pg, root, detached) == "public.fourth"
