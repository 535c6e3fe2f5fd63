"""How long ago transactions were, by the ids that PostgreSQL keeps of them in rows and in the catalog."""

from __future__ import annotations

from pg_cdc_source.offsets import XIDS

_OLDEST = (1 << 31) - 1


def age_of(xid: str) -> str:
    """SQL for how many transactions ago the one was that wrote something which is there; at most 2147483647.

    A row keeps its id for ever, also once it is frozen. Of one more than 2^31 transactions ago age() is negative, as of
    one that is yet to come.
    """
    return f"CASE WHEN pg_catalog.age({xid}) OPERATOR(pg_catalog.<) 0 THEN {_OLDEST} ELSE pg_catalog.age({xid}) END"


def before_snapshot(xid: str) -> str:
    """SQL for how many transactions before what the query sees the one was of the catalog's row that it sees.

    ``xid`` is a bigint. That of one of more than 2^32 transactions ago comes to that of a later one.
    """
    return f"((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - {xid}) & {XIDS - 1})"
