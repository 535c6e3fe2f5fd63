"""Defects of the server that lose or stop a read or a stream, by the minor versions that have them.

By PostgreSQL's release notes and commits, and by what servers did where a comment says so. A server of the newest minor
version has none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg2.extensions import connection as Session


@dataclass(frozen=True, slots=True)
class ServerDefect:
    """``effect`` in words. ``fixed`` has the first minor version of each major one that is without it.

    ``since`` has the first ones that have it, None where all before ``fixed`` do. A major version that is not in
    ``fixed`` never had it.
    """

    effect: str
    fixed: tuple[int, ...]
    since: tuple[int, ...] | None = None

    def is_in(self, version: int) -> bool:
        """Whether a server with this ``server_version_num`` has it."""
        is_before = any(version < fixed for fixed in self.fixed if _is_same(fixed, version))
        return is_before and (
            self.since is None or any(begin <= version for begin in self.since if _is_same(begin, version))
        )


def _is_same(version: int, other: int) -> bool:
    return version // 10000 == other // 10000


# A session that decodes a transaction which was open at ALTER PUBLICATION goes on with the publication of before, also
# behind that transaction (commit 4909b38af).
STALE_PUBLICATION = ServerDefect(
    "of a table that is added to the publication while transactions are open, changes may not be sent",
    (170005, 160009, 150013, 140018, 130021),
)
# Slots that the stream makes for itself begin with a full snapshot (commit message of July 2024).
PARTIAL_TRANSACTION = ServerDefect(
    "a slot that pg_create_logical_replication_slot() made may begin within a transaction, without its first part",
    (160004, 150008, 140013, 130016),
)
SERVER_DEFECTS = (
    STALE_PUBLICATION,
    ServerDefect(
        "where tables are altered while transactions are open, decoding may end with 'invalid memory alloc request "
        "size', and go on only on a newer one",
        (170006, 160010, 150014, 140019, 130022),
        STALE_PUBLICATION.fixed,
    ),
    ServerDefect(
        "after a crash, the server may have removed WAL that the slot needs",
        (170006, 160010, 150014, 140019, 130022),
    ),
    PARTIAL_TRANSACTION,
    # pgoutput copied the layouts of tables without the values of columns that were added. Seen in 15.1, 15.5 and 16.1,
    # and not in 15.6 and 16.2.
    ServerDefect(
        "under REPLICA IDENTITY FULL, the old row of a change has NULL in a column with a DEFAULT that was added "
        "behind it; with a row filter on such a column, deletes are not sent",
        (160002, 150006),
    ),
    # The old key has more columns than the Relation message says. Seen in 15.1, and not in 15.3.
    ServerDefect(
        "where a column list leaves out columns, the stream may end at an UPDATE of a key",
        (150002,),
    ),
    ServerDefect(
        "an UPDATE does not say the key of its row, where that is so large that it is stored out of line",
        (140003, 130007),
    ),
)


# Of a standby alone (postgres/standby_snapshots.py). Seen in 13.23, 16.14, 17.10 and 18.6, and not in 15.20, so that
# those which came out with that are taken to be without it. 13 has no later version.
INCOMPLETE_EXPORT = ServerDefect(
    "rows that are read from a standby may not be of one point, while a transaction on its primary has more than 64 "
    "subtransactions",
    (190001, 180007, 170012, 160016, 150020, 140025, 139999),
)


def defects_of(version: int) -> list[ServerDefect]:
    """Return the defects that a server with this ``server_version_num`` has."""
    return [defect for defect in SERVER_DEFECTS if defect.is_in(version)]


def newest_known(version: int) -> str:
    """Return the first minor version of the same major one that is known to have none of them, as ``17.6``."""
    return _shown(max(fixed for d in SERVER_DEFECTS for fixed in d.fixed if _is_same(fixed, version)))


def newest_without(defect: ServerDefect, version: int) -> str:
    """Return the first version without the defect, of the same major one if there is one."""
    fixed = next(fixed for fixed in defect.fixed if _is_same(fixed, version))
    return _shown(fixed) if fixed % 10000 < 9999 else "of a newer major version"


def _shown(version: int) -> str:
    return f"{version // 10000}.{version % 10000}"


def may_begin_within_transactions(session: Session) -> bool:
    """Whether a slot that SQL has made may lack the first part of a transaction on the server of a session."""
    return PARTIAL_TRANSACTION.is_in(session.server_version)


def has_stale_publications(session: Session) -> bool:
    """Whether the server of a session may not send changes of tables that have just been published."""
    return STALE_PUBLICATION.is_in(session.server_version)
