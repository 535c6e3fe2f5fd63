"""Partitions that were tables of their own before: which one had rows, of which nothing is sent when it is attached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from psycopg2 import sql
from psycopg2.errors import LockNotAvailable, QueryCanceled
from psycopg2.extensions import TRANSACTION_STATUS_INERROR
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import TransientError
from pg_cdc_source.offsets import XIDS
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.lock_waits import taking_at_most, waiting_for_nobody
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.trees import IS_STAYING, TREE
from pg_cdc_source.postgres.xids import age_of, before_snapshot

# What is created as a partition has all its catalog rows from one transaction. That of a system column stays for ever,
# while an ATTACH writes that of every other column anew: so one is told that has the CREATE in its transaction.
_WAS_ATTACHED = f"""
    JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = tree.oid AND tree.oid <> tree.root AND {IS_STAYING}
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tree.oid AND a.attname = 'tableoid' AND (
        a.xmin <> i.xmin
        OR NOT EXISTS (
            SELECT
            FROM pg_catalog.pg_attribute AS c
            WHERE c.attrelid = tree.oid AND c.attnum > 0 AND c.xmin = a.xmin AND c.cmin = a.cmin
        )
    )
"""

_NONE = "0"


@dataclass(frozen=True, slots=True)
class Attachments:
    """The partitions of a root that were tables of their own before, as a query saw them; as text ``77.81f5c0.79``.

    ``digest`` is of the transactions that attached them, and tells whether any was attached or has left since. All that
    were attached before the transaction ``horizon`` are among them, and of later ones those by ``recent``: one may have
    an older id than what was attached before it, and an id comes again after 2^32 transactions. A partition counts as
    new if it is none of these.

    Of older releases there is the last transaction alone, 0 for none.
    """

    digest: str
    horizon: int = field(compare=False)
    recent: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, text: str) -> Attachments:
        """Read what ``str()`` writes."""
        horizon, *rest = text.split(".")
        if not rest:
            return cls("", int(horizon), (int(horizon),))
        return cls(rest[0], int(horizon), tuple(map(int, rest[1:])))

    def __str__(self) -> str:
        return ".".join(map(str, (self.horizon, self.digest, *self.recent))) if self.digest else str(self.horizon)

    def may_have_more_than(self, earlier: Attachments) -> bool:
        return self.digest not in (_NONE, earlier.digest)


_READ_ATTACHED = f"""
WITH RECURSIVE {TREE},
attached (root, xid) AS (
    SELECT DISTINCT tree.root, i.xmin::text::bigint
    FROM tree
    {_WAS_ATTACHED}
),
horizon (xid) AS (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint & {XIDS - 1})
SELECT
    of.root,
    coalesce(
        left(encode(sha256(string_agg(attached.xid::text, ',' ORDER BY attached.xid)::bytea), 'hex'), 16), '{_NONE}'
    ),
    horizon.xid,
    coalesce(
        array_agg(attached.xid ORDER BY attached.xid) FILTER (
            WHERE {before_snapshot("attached.xid")} <= {before_snapshot("horizon.xid")}
        ),
        '{{}}'
    )
FROM unnest(%(roots)s::bigint[]) AS of (root)
CROSS JOIN horizon
LEFT JOIN attached ON attached.root = of.root
GROUP BY of.root, horizon.xid
"""


def read_attachments(session: Session, roots: Sequence[int]) -> dict[int, Attachments]:
    """By root, the partitions that were tables of their own before."""
    with translated("reading partitions"), session.cursor() as cursor:
        cursor.execute(_READ_ATTACHED, {"roots": list(roots)})
        return {root: Attachments(digest, horizon, tuple(recent)) for root, digest, horizon, recent in cursor}


# Leaves that were attached, or are under what was, and are new; in which transaction, and by which command of it. That
# is known as long as nobody has tried to detach it: who does writes the own command there.
_READ_ATTACHED_SINCE = f"""
WITH RECURSIVE {TREE},
attached (root, link, command) AS (
    SELECT tree.oid, i.xmin, CASE WHEN i.xmax::text = '0' THEN i.cmin::text::bigint END
    FROM tree
    {_WAS_ATTACHED}
    WHERE i.xmin::text::bigint <> ALL (%(recent)s::bigint[])
        AND {before_snapshot("i.xmin::text::bigint")} <= CASE
            WHEN %(horizon)s = 0 THEN {XIDS // 2} ELSE {before_snapshot("%(horizon)s")}
        END
),
below (oid, link, command) AS (
    SELECT root, link, command FROM attached
    UNION
    SELECT i.inhrelid, below.link, below.command
    FROM below JOIN pg_catalog.pg_inherits AS i ON i.inhparent = below.oid AND {IS_STAYING}
)
SELECT c.oid, n.nspname, c.relname, c.relkind, below.link::text, below.command,
    -- The last command of the same transaction that made the leaf or what belongs to it, before the ATTACH.
    (
        SELECT max(made.cmin::text::bigint)
        FROM pg_catalog.pg_attribute AS a
        JOIN pg_catalog.pg_depend AS made
            ON made.refclassid = 'pg_catalog.pg_class'::regclass AND made.refobjid = a.attrelid AND made.xmin = a.xmin
        WHERE a.attrelid = c.oid AND a.attname = 'tableoid' AND a.xmin = below.link
            AND (below.command IS NULL OR made.cmin::text::bigint < below.command)
    ),
    -- Who may have rewritten the leaf behind the ATTACH, and so have written its rows and its columns, or itself.
    (
        SELECT coalesce(array_agg(DISTINCT writer.xmin::text), '{{}}')
        FROM (
            SELECT a.xmin FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0
            UNION ALL SELECT c.xmin
        ) AS writer
        WHERE c.relfilenode <> c.oid AND {age_of("writer.xmin")} < {age_of("below.link")}
    ),
    -- Whether that was in the transaction of the ATTACH. This one writes the columns before its own entry.
    c.relfilenode <> c.oid AND EXISTS (
        SELECT
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.xmin = below.link
            AND coalesce(a.cmin::text::bigint > below.command, true)
    ),
    has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE') AND NOT row_security_active(c.oid)
FROM below
JOIN pg_catalog.pg_class AS c ON c.oid = below.oid AND c.relkind = 'r'
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
"""


# Rows that are older than the ATTACH. In its own transaction the number of the command tells, unless somebody has tried
# to delete or change the row, or has locked it: then it counts.
#
# A younger id can have committed before as well: that of a savepoint, or of another session while this transaction had
# its id, but not yet the lock of the ATTACH. An ATTACH that is the first command gets the lock before the id. No other
# session writes to a leaf that the transaction made itself, and rows of its savepoints have commands between the two.
_HAS_OLDER = """
SELECT EXISTS (
    SELECT
    FROM ONLY {leaf}
    WHERE {age} OPERATOR(pg_catalog.>) {age_of_link}
        OR xmin OPERATOR(pg_catalog.=) ANY ({rewriters}::pg_catalog.xid[])
        OR (
            xmin OPERATOR(pg_catalog.=) {link}::pg_catalog.xid
            AND ({is_rewritten} OR {touched} OR coalesce({before_attach}, true))
        )
        OR (
            {age} OPERATOR(pg_catalog.<) {age_of_link}
            AND coalesce({command} OPERATOR(pg_catalog.>) 0, true)
            AND (
                {made} IS NULL
                OR {touched}
                OR cmin::pg_catalog.text::pg_catalog.int8 OPERATOR(pg_catalog.>) {made}
                AND coalesce({before_attach}, true)
            )
        )
)
"""
# A partition that was attached empty and filled since is read to its end. All changes wait meanwhile, and the questions
# of a look have ten minutes together.
LONGEST_READ_SECONDS = 300.0
_TOUCHED = "xmax::pg_catalog.text OPERATOR(pg_catalog.<>) '0'"
_BEFORE_ATTACH = "cmin::pg_catalog.text::pg_catalog.int8 OPERATOR(pg_catalog.<) {command}"


class Attached(NamedTuple):
    """A partition that was attached, and whether it had rows then: ``filled``, or not known as it is ``locked`` or
    takes too ``long`` to look through.
    """

    partition: Relation
    how: Literal["filled", "locked", "long"]


def find_filled_partition(
    session: Session, root: int, earlier: Attachments, seconds: float = LONGEST_READ_SECONDS
) -> Attached | None:
    """A partition that had rows when it was attached, and is none of those that were there ``earlier``.

    None where there is none. One that this role may not read counts where it has any row. One of which ``seconds`` do
    not tell counts, and one that somebody has locked; in a transaction, these raise TransientError.
    """
    until = time.monotonic() + seconds
    with translated("looking for rows of partitions"), session.cursor() as cursor, waiting_for_nobody(cursor):
        cursor.execute(
            _READ_ATTACHED_SINCE, {"roots": [root], "horizon": earlier.horizon, "recent": list(earlier.recent)}
        )
        for *found, link, command, made, rewriters, is_rewritten, is_readable in cursor.fetchall():
            leaf = Relation(*found)
            times = {"link": sql.Literal(link), "command": sql.Literal(command), "made": sql.Literal(made)}
            before_attach = sql.SQL(_BEFORE_ATTACH).format(command=sql.Literal(command))
            older = sql.SQL(_HAS_OLDER).format(
                leaf=leaf.identifier,
                age=sql.SQL(age_of("xmin")),
                age_of_link=sql.SQL(age_of("{link}::pg_catalog.xid")).format(link=sql.Literal(link)),
                touched=sql.SQL(_TOUCHED),
                before_attach=before_attach,
                rewriters=sql.Literal(rewriters),
                is_rewritten=sql.Literal(is_rewritten),
                **times,
            )
            is_large = sql.SQL("SELECT pg_relation_size({}) > 0").format(sql.Literal(leaf.oid))
            try:
                if is_readable:
                    with taking_at_most(cursor, f"{max(1, round(until - time.monotonic()))}s"):
                        search_path.execute_by_role(cursor, older)
                        is_filled = bool(cursor.fetchone()[0])
                else:
                    cursor.execute(is_large)
                    is_filled = bool(cursor.fetchone()[0])
            except (LockNotAvailable, QueryCanceled) as error:
                if session.get_transaction_status() == TRANSACTION_STATUS_INERROR:
                    raise TransientError(f"whether {leaf} had rows before it was attached cannot be told now") from None
                return Attached(leaf, "locked" if isinstance(error, LockNotAvailable) else "long")
            if is_filled:
                return Attached(leaf, "filled")
    return None
