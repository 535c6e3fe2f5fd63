"""What can go wrong, split by what the operator must do.

::

    PgCdcError
    ├── TransientError              retry: the same call may succeed (session lost, server starting, lock busy)
    └── DefiniteError               do not retry: somebody has to change something first
        ├── OptionError             an option is unknown, malformed, contradictory or unused
        ├── ConnectError            the server cannot be reached or does not let this role in
        ├── AccessError             a relation is missing, or this role may not read all of it
        ├── ServerSetupError        the server or what stands before it lacks something (wal_level, slots, a pooler)
        ├── SnapshotLostError       the snapshot an action depends on has ended
        ├── SlotLostError           the slot no longer has what the checkpoint needs
        ├── SchemaChangedError      a relation is no longer what was planned
        ├── QueryError              PostgreSQL refused the user's own SQL (``query``, ``where``)
        ├── UnrepresentableError    a value that its Spark type cannot hold
        └── WireError               bytes that do not follow PostgreSQL's formats

Every text says what happened and where; ``remedy`` says what to do. No text ever holds a password or a row's value.
"""

from __future__ import annotations


class PgCdcError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what}\n  Remedy: {remedy}" if remedy else what)


class TransientError(PgCdcError):
    """The same call may succeed a moment later."""


class DefiniteError(PgCdcError):
    """Repeating the call does not help; something has to change first."""


class OptionError(DefiniteError):
    """An option is unknown, malformed, contradictory or unused."""


class ConnectError(DefiniteError):
    """The server cannot be reached, or does not let this role in."""


class AccessError(DefiniteError):
    """A relation is missing, or this role may not read all of it."""


class ServerSetupError(DefiniteError):
    """The server, or what stands before it, lacks something this read needs."""


class SnapshotLostError(DefiniteError):
    """The snapshot that an action depends on has ended."""


class SlotLostError(DefiniteError):
    """The slot no longer has what the checkpoint needs."""


class SchemaChangedError(DefiniteError):
    """A relation is no longer what was planned."""


class QueryError(DefiniteError):
    """PostgreSQL refused SQL that the user wrote (``query``, ``where``)."""


class UnrepresentableError(DefiniteError):
    """A value that its Spark type cannot hold."""


class WireError(DefiniteError):
    """Bytes that do not follow PostgreSQL's documented formats."""
