"""Facts from PostgreSQL's catalog: functions take a session and return frozen facts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.errors import AccessError, OptionError
from pg_cdc_source.options.names import QualifiedName, dotted, quoted
from pg_cdc_source.postgres.libpq import column_modifiers
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.values.registry import CatalogType, Column

# TID range scans, without which every ctid range would read the whole table, came with PostgreSQL 14.
TID_RANGE_SCAN_VERSION = 140000

# FirstNormalObjectId (src/include/access/transam.h): oids below it mean the same as long as the server lives.
_FIRST_OID_OF_USERS = 16384


@dataclass(frozen=True, slots=True)
class Server:
    """What the server is and what this role may do there."""

    version_num: int
    in_recovery: bool
    wal_level: str
    block_size: int
    max_connections: int
    role: str
    may_replicate: bool
    encoding: str


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


@dataclass(frozen=True, slots=True)
class Heap:
    """One stored piece of a table: the table itself, a leaf partition, or an inheritance child."""

    relation: Relation
    blocks: int
    attnums: tuple[int, ...]  # of the columns read, in their order


def read_server(session: Session) -> Server:
    with translated("reading the server's settings"), session.cursor() as cursor:
        # Managed services give the right to replicate through a role of their own (rds_replication, for one).
        cursor.execute(
            "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('wal_level'),"
            " current_setting('block_size')::int, current_setting('max_connections')::int, current_user::text,"
            " EXISTS (SELECT FROM pg_catalog.pg_roles AS r WHERE (r.rolname = current_user AND"
            " (r.rolreplication OR r.rolsuper)) OR (r.rolname IN ('rds_replication', 'rds_superuser')"
            " AND pg_has_role(current_user, r.oid, 'MEMBER'))), current_setting('server_encoding')"
        )
        row = cursor.fetchone()
        assert row is not None
        return Server(*row)


def find_relation(session: Session, name: QualifiedName) -> Relation:
    """The relation that ``name`` means in this session, by its search path where no schema is given.

    Raises AccessError that suggests a near name, OptionError for another database or for what cannot be read.
    """
    parts = name.parts
    with translated(f"looking for {name}"), session.cursor() as cursor:
        cursor.execute("SELECT current_database()")
        database = cursor.fetchone()[0]
        if len(parts) == 3:
            if parts[0] != database:
                raise OptionError(
                    f"dbtable {name} names the database {quoted(parts[0])}, the connection is to {quoted(database)}",
                    remedy="leave the database out of dbtable and set it in the connection options",
                )
            parts = parts[1:]
        text = sql.Identifier(*parts).as_string(session)
        cursor.execute(
            "SELECT c.oid, n.nspname, c.relname, c.relkind FROM pg_catalog.pg_class AS c"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)",
            (text,),
        )
        row = cursor.fetchone()
        if row is None:
            raise AccessError(
                f"{name} does not exist in database {quoted(database)}, or this role may not use its schema",
                remedy=_near_names(session, parts),
            )
    relation = Relation(*row)
    if relation.kind not in "rpvmf":
        raise OptionError(f"{relation} is not a table or view that can be read (relkind {relation.kind})")
    return relation


def _near_names(session: Session, parts: tuple[str, ...]) -> str:
    with session.cursor() as cursor:
        cursor.execute(
            "SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            " WHERE c.relkind = ANY ('{r,p,v,m,f}') AND n.nspname !~ '^pg_(toast|temp)'"
            " AND n.nspname <> 'information_schema' AND has_schema_privilege(n.oid, 'USAGE') LIMIT 20000"
        )
        known = {dotted(schema, name): f"{schema}.{name}".lower() for schema, name in cursor}
    # Without a schema, the wanted name may be in any.
    schemas = [parts[0]] if len(parts) == 2 else sorted({name.split(".")[0] for name in known.values()})
    wanted = [f"{schema}.{parts[-1]}".lower() for schema in schemas]
    near = [text for want in wanted for text in known if known[text] == want]
    near += [
        text
        for want in wanted
        for close in difflib.get_close_matches(want, known.values(), n=3, cutoff=0.8)
        for text in known
        if known[text] == close
    ]
    hint = ", ".join(dict.fromkeys(near[:3]))
    return f"did you mean {hint}?" if hint else "check the schema and the spelling; quote names that are not lower case"


def describe(session: Session, select: sql.Composable, doing: str, *, known: Sequence[Column] = ()) -> list[Column]:
    """The columns that a SELECT gives now, without reading a row.

    PostgreSQL parses the SELECT against its current catalog, locks what it names (ACCESS SHARE, until the end of the
    transaction), and checks privileges and row-level security: so this is also the test that it may be read.

    Where the columns have the types of those ``known``, and these are PostgreSQL's own, the catalog is not asked again.
    """
    with translated(doing), session.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT * FROM ({}\n) AS q LIMIT 0").format(select))
        description = cursor.description or ()
        types = [(d.type_code, modifier) for d, modifier in zip(description, column_modifiers(cursor), strict=True)]
        if types == [(column.type.oid, column.type.typmod) for column in known] and all(
            oid < _FIRST_OID_OF_USERS for oid, _ in types
        ):
            return [
                replace(column, name=d.name, attnum=d.table_column or 0, not_null=False)
                for d, column in zip(description, known, strict=True)
            ]
        cursor.execute(
            "SELECT format_type(t.oid, NULLIF(t.typmod, -1)) FROM unnest(%s::oid[], %s::int[])"
            " WITH ORDINALITY AS t (oid, typmod, i) ORDER BY t.i",
            ([oid for oid, _ in types], [modifier for _, modifier in types]),
        )
        names = [name for (name,) in cursor]
    return [
        Column(name=d.name, attnum=d.table_column or 0, type=found, type_name=type_name, not_null=False)
        for d, found, type_name in zip(description, catalog_types(session, types, doing), names, strict=True)
    ]


def catalog_types(session: Session, types: Sequence[tuple[int, int]], doing: str) -> list[CatalogType]:
    """What the catalog says of types that are given by oid and modifier; of one that is gone, only these two."""
    with translated(doing), session.cursor() as cursor:
        # With all that they are made of: what domains are over, and the elements of arrays.
        cursor.execute(
            "WITH RECURSIVE type AS (SELECT oid, typname, typbasetype, typtypmod, typelem, typarray, typdelim"
            "  FROM pg_catalog.pg_type WHERE oid = ANY (%s::oid[])"
            " UNION SELECT t.oid, t.typname, t.typbasetype, t.typtypmod, t.typelem, t.typarray, t.typdelim"
            "  FROM type JOIN pg_catalog.pg_type AS t ON t.oid = type.typbasetype OR t.oid = type.typelem)"
            " SELECT type.*,"
            " (SELECT e.extname FROM pg_catalog.pg_depend AS d JOIN pg_catalog.pg_extension AS e ON e.oid = d.refobjid"
            "  WHERE d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = type.oid AND d.deptype = 'e'"
            "  AND d.refclassid = 'pg_catalog.pg_extension'::regclass),"
            " EXISTS (SELECT FROM pg_catalog.pg_cast AS c WHERE c.castsource = type.oid"
            "  AND c.casttarget = 'pg_catalog.text'::regtype AND c.castmethod <> 'i') FROM type",
            (sorted({oid for oid, _ in types}),),
        )
        facts = {oid: found for oid, *found in cursor}

    def one(oid: int, modifier: int) -> CatalogType:
        if oid not in facts:
            return CatalogType(oid, modifier)
        name, base_oid, base_modifier, element_oid, _, _, extension, has_text_cast = facts[oid]
        if base_oid:
            return one(base_oid, base_modifier)
        plain = CatalogType(oid, modifier, name, extension or "", has_text_cast=has_text_cast)
        # Other types than arrays have elements too: they can be subscripted.
        if element_oid not in facts or facts[element_oid][4] != oid:
            return plain
        delimiter = facts[element_oid][5]
        return replace(plain, element=one(element_oid, modifier), element_oid=element_oid, delimiter=delimiter)

    return [one(oid, modifier) for oid, modifier in types]


def not_null_attnums(session: Session, relation: Relation) -> frozenset[int]:
    with translated(f"reading the columns of {relation}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT attnum FROM pg_catalog.pg_attribute WHERE attrelid = %s AND attnotnull AND attnum > 0",
            (relation.oid,),
        )
        return frozenset(attnum for (attnum,) in cursor)


def attnums(session: Session, relation: Relation) -> dict[str, int]:
    """The columns' numbers by name, in the table's order."""
    with translated(f"reading the columns of {relation}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT attname, attnum FROM pg_catalog.pg_attribute"
            " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (relation.oid,),
        )
        return dict(cursor.fetchall())


def raw_types(session: Session, relation: Relation) -> dict[str, tuple[int, int]]:
    """The columns' types and modifiers by name as pg_attribute has them: a domain's is the domain's own."""
    with translated(f"reading the columns of {relation}"), session.cursor() as cursor:
        cursor.execute(
            "SELECT attname, atttypid, atttypmod FROM pg_catalog.pg_attribute"
            " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
            (relation.oid,),
        )
        return {name: (type_oid, typmod) for name, type_oid, typmod in cursor}


def oid_of(session: Session, relation: Relation) -> int | None:
    """The oid of what has this relation's name now."""
    with translated(f"looking for {relation}"), session.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s)::oid::bigint", (relation.identifier.as_string(session),))
        found: int | None = cursor.fetchone()[0]
        return found


def read_heaps(session: Session, server: Server, relation: Relation, columns: Sequence[str]) -> list[Heap] | None:
    """The heaps under a relation that ctid ranges can be cut from; None where it has to be read as a whole.

    As a whole: views, foreign tables, tables of other access methods, servers without TID range scans; and trees in
    which this role may read the root but not each leaf, or in which a leaf has policies that do not apply through the
    root.
    """
    if relation.kind not in "rpm" or server.version_num < TID_RANGE_SCAN_VERSION:
        return None
    with translated(f"planning ranges of {relation}"), session.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE tree (oid) AS (SELECT %(root)s::oid"
            " UNION SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid)"
            " SELECT c.oid, n.nspname, c.relname, c.relkind, am.amname,"
            " has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE')"
            " AND (c.oid = %(root)s OR NOT row_security_active(c.oid)),"
            " CASE WHEN c.relkind IN ('r', 'm') THEN pg_relation_size(c.oid) END,"
            " (SELECT array_agg(a.attnum ORDER BY w.i) FROM unnest(%(columns)s::text[]) WITH ORDINALITY AS w (name, i)"
            "  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attname = w.name AND NOT a.attisdropped)"
            " FROM tree JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            " LEFT JOIN pg_catalog.pg_am AS am ON am.oid = c.relam"
            " ORDER BY c.oid <> %(root)s, c.oid",
            {"root": relation.oid, "columns": list(columns)},
        )
        rows = [row for row in cursor if row[3] != "p"]
    heaps = []
    for oid, schema, name, kind, access_method, readable, size_bytes, attnums in rows:
        if access_method != "heap" or not readable or size_bytes is None:
            return None
        heaps.append(Heap(Relation(oid, schema, name, kind), -(-size_bytes // server.block_size), tuple(attnums or ())))
    return heaps


def identify_heaps(session: Session, relation: Relation) -> int:
    """A number for the set of tables under a relation, as the transaction's snapshot sees it."""
    with translated(f"reading the partitions of {relation}"), session.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE tree (oid) AS (SELECT %s::oid"
            " UNION SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid)"
            " SELECT hashtextextended(string_agg(oid::text, ',' ORDER BY oid), 0) FROM tree",
            (relation.oid,),
        )
        return int(cursor.fetchone()[0])


def read_blocks(session: Session, server_block_size: int, heap: Relation) -> int:
    """Blocks the heap has now."""
    with translated(f"reading the size of {heap}"), session.cursor() as cursor:
        cursor.execute("SELECT pg_relation_size(%s)", (heap.oid,))
        size_bytes: int = cursor.fetchone()[0]
        return -(-size_bytes // server_block_size)
