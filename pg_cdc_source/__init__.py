"""PostgreSQL in Spark: tables at one consistent point (``pgsnapshot``), and their changes from there (``pgcdc``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pg_cdc_source.errors import DefiniteError as DefiniteError
    from pg_cdc_source.errors import PgCdcError as PgCdcError
    from pg_cdc_source.errors import SlotLostError as SlotLostError
    from pg_cdc_source.errors import TransientError as TransientError
    from pg_cdc_source.offsets import Lsn as Lsn
    from pg_cdc_source.postgres.snapshots import OpenSnapshot as OpenSnapshot
    from pg_cdc_source.postgres.snapshots import open_snapshot as open_snapshot
    from pg_cdc_source.spark.frames import collapse as collapse
    from pg_cdc_source.spark.frames import project as project
    from pg_cdc_source.spark.pgcdc import PgCdcDataSource as PgCdcDataSource
    from pg_cdc_source.spark.pgcdc import register as register
    from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource as PgSnapshotDataSource

# Names are imported when they are used: processes that hold snapshots need neither Spark nor Arrow.
_HOME = {
    "PgSnapshotDataSource": "spark.pgsnapshot",
    "PgCdcDataSource": "spark.pgcdc",
    "register": "spark.pgcdc",
    "DefiniteError": "errors",
    "PgCdcError": "errors",
    "SlotLostError": "errors",
    "TransientError": "errors",
    "collapse": "spark.frames",
    "project": "spark.frames",
    "Lsn": "offsets",
    "OpenSnapshot": "postgres.snapshots",
    "open_snapshot": "postgres.snapshots",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
