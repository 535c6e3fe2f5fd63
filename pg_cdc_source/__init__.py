"""PostgreSQL in Spark: tables at one consistent point (``pgsnapshot``), and their changes from there (``pgcdc``)."""

import importlib as _importlib
import typing as _typing

from pg_cdc_source._version import __version__ as __version__
from pg_cdc_source.logs import follow_environment as _follow_environment

if _typing.TYPE_CHECKING:
    from pg_cdc_source.errors import DefiniteError as DefiniteError
    from pg_cdc_source.errors import PgCdcError as PgCdcError
    from pg_cdc_source.errors import SlotLostError as SlotLostError
    from pg_cdc_source.errors import TransientError as TransientError
    from pg_cdc_source.mirrors.query import mirror as mirror
    from pg_cdc_source.mirrors.query import mirror_at as mirror_at
    from pg_cdc_source.offsets import Lsn as Lsn
    from pg_cdc_source.spark.collapse import collapse as collapse
    from pg_cdc_source.spark.open_snapshot import OpenSnapshot as OpenSnapshot
    from pg_cdc_source.spark.open_snapshot import open_snapshot as open_snapshot
    from pg_cdc_source.spark.pgcdc import PgCdcDataSource as PgCdcDataSource
    from pg_cdc_source.spark.pgsnapshot import PgSnapshotDataSource as PgSnapshotDataSource
    from pg_cdc_source.spark.project import project as project
    from pg_cdc_source.spark.read import read as read
    from pg_cdc_source.spark.read import stream as stream
    from pg_cdc_source.spark.register import register as register

_follow_environment()

# Names are imported when they are used: processes that hold snapshots need neither Spark nor Arrow.
_HOME = {
    "PgSnapshotDataSource": "spark.pgsnapshot",
    "PgCdcDataSource": "spark.pgcdc",
    "register": "spark.register",
    "DefiniteError": "errors",
    "PgCdcError": "errors",
    "SlotLostError": "errors",
    "TransientError": "errors",
    "collapse": "spark.collapse",
    "project": "spark.project",
    "Lsn": "offsets",
    "OpenSnapshot": "spark.open_snapshot",
    "mirror": "mirrors.query",
    "mirror_at": "mirrors.query",
    "read": "spark.read",
    "stream": "spark.read",
    "open_snapshot": "spark.open_snapshot",
}

# The folder stream/ has the name of a function. Python binds a folder's name when it is imported for the first time.
_importlib.import_module(f"{__name__}.stream")
del globals()["stream"]

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
