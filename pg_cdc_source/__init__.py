"""PostgreSQL in Spark: tables at one consistent point (``pgsnapshot``), and their changes from there (``pgcdc``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pg_cdc_source.batch import PgSnapshotDataSource as PgSnapshotDataSource
    from pg_cdc_source.errors import DefiniteError as DefiniteError
    from pg_cdc_source.errors import PgCdcError as PgCdcError
    from pg_cdc_source.errors import SlotLostError as SlotLostError
    from pg_cdc_source.errors import TransientError as TransientError
    from pg_cdc_source.frames import collapse as collapse
    from pg_cdc_source.frames import project as project
    from pg_cdc_source.offsets import Lsn as Lsn
    from pg_cdc_source.snapshot import OpenSnapshot as OpenSnapshot
    from pg_cdc_source.snapshot import open_snapshot as open_snapshot
    from pg_cdc_source.stream import PgCdcDataSource as PgCdcDataSource
    from pg_cdc_source.stream import register as register

# Names are imported when they are used: processes that hold snapshots need neither Spark nor Arrow.
_HOME = {
    "PgSnapshotDataSource": "batch",
    "PgCdcDataSource": "stream",
    "register": "stream",
    "DefiniteError": "errors",
    "PgCdcError": "errors",
    "SlotLostError": "errors",
    "TransientError": "errors",
    "collapse": "frames",
    "project": "frames",
    "Lsn": "offsets",
    "OpenSnapshot": "snapshot",
    "open_snapshot": "snapshot",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
