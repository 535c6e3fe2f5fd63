"""The server and its relations, as frozen facts from the catalog."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError, ServerSetupError
from pg_cdc_source.options.names import MAX_NAME_BYTES, QualifiedName, dotted, quoted
from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.services import SERVICES, Service, service_of

DECODING_ON_DEMAND_VERSION = 190000


@dataclass(frozen=True, slots=True)
class Server:
    """What the server is and what this role may do there.

    ``wal_level`` is the setting; ``effective_wal_level`` is what is written now (PostgreSQL 19), before 19 the same.
    ``old_snapshot_threshold`` is the setting as it is shown, None where there is none (from 17 on).
    """

    version_num: int
    in_recovery: bool
    wal_level: str
    effective_wal_level: str
    block_size: int
    role: str
    may_replicate: bool
    old_snapshot_threshold: str | None
    service: Service | None

    @property
    def decodes_on_demand(self) -> bool:
        """Whether the first logical slot would turn logical decoding on, and the end of the last one off again.

        That is so on a primary from 19 on. A standby follows its primary, where a slot has to be first.
        """
        on_demand = self.version_num >= DECODING_ON_DEMAND_VERSION and self.wal_level == "replica"
        return on_demand and self.effective_wal_level != "logical" and not self.in_recovery

    @property
    def replication_grant(self) -> str:
        """What lets this role use replication slots here: services have a way of their own."""
        grant = "ALTER ROLE {role} REPLICATION" if self.service is None else self.service.replicating
        return grant.format(role=quoted(self.role))

    def require_lasting_snapshots(self) -> None:
        """Raise ServerSetupError where the server removes rows that a snapshot still sees.

        "Snapshot too old" is an error only in a session whose own snapshot is that old. A session that has imported one
        since finds fewer rows, in silence: imported snapshots have the time and the LSN of the import.
        """
        if self.old_snapshot_threshold not in (None, "-1"):
            raise ServerSetupError(
                f"the server's old_snapshot_threshold is {self.old_snapshot_threshold}: after that time it removes "
                "rows that a snapshot still sees, and sessions that share the snapshot miss them without an error",
                remedy="set old_snapshot_threshold = -1, which is the default, and restart the server",
            )


@dataclass(frozen=True, slots=True)
class Relation:
    """A table or what can be read like one. ``kind`` is pg_class.relkind: r, p, v, m or f."""

    oid: int
    schema: str
    name: str
    kind: str

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return dotted(self.schema, self.name)


# Managed services give the right to replicate through a role of their own (rds_replication, for one).
READ_SERVER = """
SELECT current_setting('server_version_num')::int,
    pg_is_in_recovery(),
    current_setting('wal_level'),
    coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
    current_setting('block_size')::int,
    current_user::text,
    EXISTS (
        SELECT
        FROM pg_catalog.pg_roles AS r
        WHERE r.rolname = current_user AND (r.rolreplication OR r.rolsuper)
            OR r.rolname IN ('rds_replication', 'rds_superuser') AND pg_has_role(current_user, r.oid, 'MEMBER')
    ),
    current_setting('old_snapshot_threshold', true),
    ARRAY(SELECT r.rolname::pg_catalog.text FROM pg_catalog.pg_roles AS r WHERE r.rolname = ANY (%s)),
    EXISTS (SELECT FROM pg_catalog.pg_proc AS p WHERE p.proname = 'aurora_version')
"""


def is_in_recovery(session: Session) -> bool:
    """Whether the server is a standby now."""
    with translated("looking at the server"), session.cursor() as cursor:
        cursor.execute("SELECT pg_is_in_recovery()")
        return bool(cursor.fetchone()[0])


def read_server(session: Session) -> Server:
    with translated("reading the server's settings"), session.cursor() as cursor:
        cursor.execute(READ_SERVER, (list(SERVICES),))
        return server_of(cursor.fetchone())


def server_of(row: Sequence[Any]) -> Server:
    """The server that a row of ``READ_SERVER`` tells of."""
    *facts, roles, has_aurora_version = row
    return Server(*(*facts, service_of(roles, has_aurora_version=has_aurora_version)))


# What it looks for is a name of ``names_with_schemas``.
FIND_RELATION = """
SELECT current_database(), c.oid, n.nspname, c.relname, c.relkind
FROM (VALUES (to_regclass(%s))) AS named (oid)
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = named.oid
LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
"""


def find_relation(session: Session, name: QualifiedName) -> Relation:
    """The relation that ``name`` means in this session, by its search path where no schema is given.

    Raises AccessError that suggests a near name, OptionError for another database or for what cannot be read.
    """
    return find_relations(session, [name])[0]


_FIND_RELATIONS = """
SELECT current_database(), c.oid, n.nspname, c.relname, c.relkind
FROM unnest(%s::pg_catalog.text[]) WITH ORDINALITY AS given (name, i)
CROSS JOIN LATERAL to_regclass(given.name) AS named (oid)
LEFT JOIN pg_catalog.pg_class AS c ON c.oid = named.oid
LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
ORDER BY given.i
"""


def find_relations(session: Session, names: Sequence[QualifiedName]) -> list[Relation]:
    """As :func:`find_relation`, of several names. Raises for the first one that it raises for."""
    if not names:
        return []
    shown = f"{names[0]}{' and others' if len(names) > 1 else ''}"
    with translated(f"looking for {shown}"), session.cursor() as cursor:
        cursor.execute(_FIND_RELATIONS, (names_with_schemas(session, names),))
        return [relation_of(session, name, row) for name, row in zip(names, cursor.fetchall(), strict=True)]


_FIND_SCHEMAS = """
SELECT (
    SELECT n.nspname
    FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
    WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(given.name)::pg_catalog.oid
)
FROM pg_catalog.unnest(%s::pg_catalog.text[]) WITH ORDINALITY AS given (name, i)
ORDER BY given.i
"""


def names_with_schemas(session: Session, names: Sequence[QualifiedName]) -> list[str]:
    """The names as SQL, where they have no schema with the one in which the role's search_path finds a relation."""
    parts = [name.parts[-2:] for name in names]
    bare = list(dict.fromkeys(part for part in parts if len(part) == 1))
    schemas: dict[tuple[str, ...], str | None] = {}
    if bare:
        with translated(f"looking for {dotted(*bare[0])}"), session.cursor() as cursor:
            given = [sql.Identifier(*part).as_string(session) for part in bare]
            search_path.execute_by_role(cursor, _FIND_SCHEMAS, (given,))
            schemas = dict(zip(bare, (schema for (schema,) in cursor), strict=True))
    found = [part if schemas.get(part) is None else (schemas[part], *part) for part in parts]
    return [str(sql.Identifier(*part).as_string(session)) for part in found]


def relation_of(session: Session, name: QualifiedName, row: Sequence[Any]) -> Relation:
    """The relation that a row of ``FIND_RELATION`` tells of. Raises as ``find_relation``."""
    database, *found = row
    if len(name.parts) == 3 and name.parts[0] != database:
        raise OptionError(
            f"the table {name} names the database {quoted(name.parts[0])}, the connection is to {quoted(database)}",
            remedy="leave the database out of the table's name and set it in the connection options",
        )
    parts = list(name.parts[-2:])
    # PostgreSQL looks for the cut name, of which there may be a table as well.
    is_cut = any(len(part.encode()) > MAX_NAME_BYTES for part in parts) and found[3 - len(parts) : 3] != parts
    if found[0] is None or is_cut:
        limit = f"; names have at most {MAX_NAME_BYTES} bytes in the database's encoding" if is_cut else ""
        raise AccessError(
            f"{name} does not exist in database {quoted(database)}, or this role may not use its schema{limit}",
            remedy=_near_names(session, name.parts[-2:]),
        )
    relation = Relation(*found)
    if relation.kind not in "rpvmf":
        raise OptionError(
            f"{relation} is not a table or view that can be read (relkind {relation.kind})",
            remedy="name a table, a view, a materialized view or a foreign table; or read with the option query",
        )
    return relation


_READ_NAMES = """
SELECT n.nspname, c.relname
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
    AND n.nspname !~ '^pg_(toast|temp)'
    AND n.nspname <> 'information_schema'
    AND has_schema_privilege(n.oid, 'USAGE')
LIMIT 20000
"""


def _near_names(session: Session, parts: tuple[str, ...]) -> str:
    # A name without a schema may be meant in any. They are no part of it then: long ones would make all names alike.
    wanted, cutoff = ".".join(parts).lower(), 0.8 if len(parts) == 2 else 0.6
    with translated("looking for near names"), session.cursor() as cursor:
        cursor.execute(_READ_NAMES)
        known = {
            dotted(schema, name): ".".join((schema, name)[-len(parts) :]).lower()
            for schema, name in cursor
            if schema != "pg_catalog" or wanted.startswith("pg_")
        }
    close = difflib.get_close_matches(wanted, known.values(), n=3, cutoff=cutoff)
    near = [text for like in (wanted, *close) for text in known if known[text] == like]
    hint = ", ".join(dict.fromkeys(near[:3]))
    return f"did you mean {hint}?" if hint else "check the schema and the spelling; quote names that are not lower case"


_READ_OIDS = """
SELECT to_regclass(t.name)::oid::bigint
FROM unnest(%s::pg_catalog.text[]) WITH ORDINALITY AS t (name, i)
ORDER BY t.i
"""


def oids_of(session: Session, relations: Sequence[Relation]) -> list[int | None]:
    """The oids of what has these relations' names now."""
    with translated(f"looking for {relations[0]}"), session.cursor() as cursor:
        cursor.execute(_READ_OIDS, ([relation.identifier.as_string(session) for relation in relations],))
        return [oid for (oid,) in cursor]
