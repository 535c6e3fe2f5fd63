"""Columns and their types: of a SELECT, and of a table as the catalog has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg2 import sql
from psycopg2.extensions import connection as Session

from pg_cdc_source.postgres import search_path
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.libpq import column_modifiers, described
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.values.registry import CatalogType, Column

# FirstNormalObjectId (src/include/access/transam.h): oids below it mean the same as long as the server lives.
_FIRST_OID_OF_USERS = 16384


def describe_columns(
    session: Session,
    select: sql.Composable,
    doing: str,
    *,
    known: Sequence[Column] = (),
    written: Mapping[str, str] | None = None,
) -> list[Column]:
    """The columns that a SELECT gives now, without reading a row.

    PostgreSQL parses the SELECT against its current catalog, locks what it names (ACCESS SHARE, until the end of the
    transaction), and checks privileges and row-level security: so this is also the test that it may be read.

    Where all types are among those of the ``known`` columns, and PostgreSQL's own, the catalog is not asked again.
    ``written`` is what the user has written of the SELECT, by option.
    """
    with translated(doing, written), session.cursor() as cursor:
        search_path.execute_by_role(cursor, sql.SQL("SELECT * FROM ({}\n) AS q LIMIT 0").format(select))
        description = cursor.description or ()
        types = [(d.type_code, modifier) for d, modifier in zip(description, column_modifiers(cursor), strict=True)]
    found = _described_types(types, known, lambda given: _read_named_types(session, given, doing))
    return [_column_of(facts, d.name, d.table_column or 0) for d, facts in zip(description, found, strict=True)]


# MaxTupleAttributeNumber (src/include/access/htup_details.h): as many columns may a statement give.
MOST_COLUMNS = 1664


def describe_tables(
    session: Session, tables: Sequence[Relation], known: Sequence[Column], doing: str
) -> list[list[Column]]:
    """The columns that each of the tables has now under the names of those ``known``; the tables are locked.

    All of them have MOST_COLUMNS columns together at most. They are described at once and nothing is planned: a table
    of 7 columns takes 20 µs of the server's CPU so, and 150 µs by a SELECT of its own. It is no test that the tables
    may be read.
    """
    # The columns' names stand there for each table: quoting them anew would take longer than all the rest.
    names = [sql.Identifier(column.name).as_string(session) for column in known]
    quoted = [table.identifier.as_string(session) for table in tables]
    statement = "SELECT {} FROM {}".format(
        ", ".join(f"{table}.{name}" for table in quoted for name in names),
        ", ".join(f"ONLY {table}" for table in quoted),
    )
    found = described(session.pgconn_ptr, statement.encode(), doing)
    types = [(oid, modifier) for _, oid, modifier in found]
    # Nobody reads the types' names but in a message.
    facts = _described_types(types, known, lambda given: _read_types(session, given, doing))
    columns = [
        _column_of(fact, column.name, attnum)
        for fact, column, (attnum, _, _) in zip(facts, [*known] * len(tables), found, strict=True)
    ]
    return [columns[i * len(known) : (i + 1) * len(known)] for i in range(len(tables))]


def _column_of(facts: tuple[CatalogType, str], name: str, attnum: int) -> Column:
    found, type_name = facts
    return Column(name, attnum, found, type_name, not_null=False)


def _described_types(
    types: Sequence[tuple[int, int]],
    known: Sequence[Column],
    read: Callable[[Sequence[tuple[int, int]]], list[tuple[CatalogType, str]]],
) -> list[tuple[CatalogType, str]]:
    """What types are, given by oid and modifier, and their names: read where not all are PostgreSQL's and known."""
    given = list(dict.fromkeys(types))
    facts = {
        (column.type.oid, column.type.typmod): (column.type, column.type_name)
        for column in known
        if column.type.oid < _FIRST_OID_OF_USERS
    }
    if not facts.keys() >= set(given):
        facts = dict(zip(given, read(given), strict=True))
    return [facts[given_type] for given_type in types]


# The names of the types, with what they are and all that they are made of: what domains are over, and the elements of
# arrays. In one statement, because a load waits for each.
_READ_TYPES = """
WITH RECURSIVE given AS (
    SELECT *
    FROM unnest(%s::oid[], %s::int[]) WITH ORDINALITY AS t (oid, typmod, i)
),
type AS (
    SELECT oid, typname, typbasetype, typtypmod, typelem, typarray, typdelim
    FROM pg_catalog.pg_type
    WHERE oid IN (SELECT oid FROM given)
    UNION
    SELECT t.oid, t.typname, t.typbasetype, t.typtypmod, t.typelem, t.typarray, t.typdelim
    FROM type
    JOIN pg_catalog.pg_type AS t ON t.oid = type.typbasetype OR t.oid = type.typelem
)
SELECT (SELECT array_agg(format_type(oid, NULLIF(typmod, -1)) ORDER BY i) FROM given),
    type.*,
    (
        SELECT e.extname
        FROM pg_catalog.pg_depend AS d
        JOIN pg_catalog.pg_extension AS e ON e.oid = d.refobjid
        WHERE d.classid = 'pg_catalog.pg_type'::regclass
            AND d.objid = type.oid
            AND d.deptype = 'e'
            AND d.refclassid = 'pg_catalog.pg_extension'::regclass
    ),
    EXISTS (
        SELECT
        FROM pg_catalog.pg_cast AS c
        WHERE c.castsource = type.oid AND c.casttarget = 'pg_catalog.text'::regtype AND c.castmethod <> 'i'
    )
FROM (SELECT) AS one_row
LEFT JOIN type ON true
"""


def read_types(session: Session, types: Sequence[tuple[int, int]], doing: str) -> list[CatalogType]:
    """What the catalog says of types given by oid and modifier; of a type that is gone, only these two."""
    return [found for found, _ in _read_types(session, types, doing)]


_READ_NAMES = """
SELECT pg_catalog.format_type(t.oid, t.typmod)
FROM ROWS FROM (
    pg_catalog.unnest(%s::pg_catalog.oid[]), pg_catalog.unnest(%s::pg_catalog.int4[])
) WITH ORDINALITY AS t (oid, typmod, i)
ORDER BY t.i
"""


def read_type_names(session: Session, types: Sequence[tuple[int, int | None]], doing: str) -> list[str]:
    """The types, given by oid and modifier, as format_type() writes them for the role."""
    with translated(doing), session.cursor() as cursor:
        given = ([oid for oid, _ in types], [modifier for _, modifier in types])
        search_path.execute_by_role(cursor, _READ_NAMES, given)
        return [name for (name,) in cursor]


def _read_named_types(session: Session, types: Sequence[tuple[int, int]], doing: str) -> list[tuple[CatalogType, str]]:
    """As ``read_types``, each with its name as format_type() writes it for the role."""
    found = _read_types(session, types, doing)
    # Others have no schema in their names, whatever the search_path is.
    of_users = [i for i, (oid, _) in enumerate(types) if oid >= _FIRST_OID_OF_USERS]
    if of_users:
        given = [(oid, None if modifier == -1 else modifier) for oid, modifier in (types[i] for i in of_users)]
        for i, name in zip(of_users, read_type_names(session, given, doing), strict=True):
            found[i] = (found[i][0], name)
    return found


def _read_types(session: Session, types: Sequence[tuple[int, int]], doing: str) -> list[tuple[CatalogType, str]]:
    """As ``read_types``, each with its name as format_type() writes it for this session."""
    if not types:
        return []
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_TYPES, ([oid for oid, _ in types], [modifier for _, modifier in types]))
        rows = cursor.fetchall()
    names, facts = rows[0][0], {oid: found for _, oid, *found in rows}

    def one(oid: int, modifier: int) -> CatalogType:
        if oid not in facts:
            return CatalogType(oid, modifier)
        name, base_oid, base_modifier, element_oid, _, _, extension, has_text_cast = facts[oid]
        if base_oid:
            return one(base_oid, base_modifier)
        plain = CatalogType(oid, modifier, name, extension or "", has_text_cast=has_text_cast)
        # Types other than arrays have elements too: they can be subscripted.
        if element_oid not in facts or facts[element_oid][4] != oid:
            return plain
        delimiter = facts[element_oid][5]
        return replace(plain, element=one(element_oid, modifier), element_oid=element_oid, delimiter=delimiter)

    return [(one(oid, modifier), name) for (oid, modifier), name in zip(types, names, strict=True)]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of a table as pg_attribute has it."""

    name: str
    attnum: int
    not_null: bool
    is_virtual: bool  # a generated column that is computed when it is read (PostgreSQL 18)


_READ_ATTRIBUTES = """
SELECT attname, attnum, attnotnull, attgenerated = 'v'
FROM pg_catalog.pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
"""


def read_attributes(session: Session, relation: Relation) -> list[Attribute]:
    """The columns, in the table's order."""
    with translated(f"reading the columns of {relation}"), session.cursor() as cursor:
        cursor.execute(_READ_ATTRIBUTES, (relation.oid,))
        return [Attribute(*row) for row in cursor]


_READ_PRESENT = """
SELECT named.oid::bigint, a.attname, a.attnum
FROM (VALUES (to_regclass(%s)::oid)) AS named (oid)
LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = named.oid AND a.attnum > 0 AND NOT a.attisdropped
"""


def read_present(session: Session, relation: Relation, *, begins: bool) -> tuple[int | None, dict[str, int]]:
    """The oid of what has a relation's name now, and the numbers of its columns by name.

    With ``begins``, this is the first statement of a transaction whose statements all see the same.
    """
    begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; " if begins else ""
    with translated(f"planning {relation}"), session.cursor() as cursor:
        cursor.execute(f"{begin}{_READ_PRESENT}", (relation.identifier.as_string(session),))
        rows = cursor.fetchall()
    return rows[0][0], {name: attnum for _, name, attnum in rows if name is not None}


@dataclass(frozen=True, slots=True)
class TypedAttribute:
    """A column with its type's oid and modifier as pg_attribute has them: a domain's are the domain's own."""

    attribute: Attribute
    type: tuple[int, int]


# PostgreSQL 18 also says attnotnull where rows from before may have NULL (NOT NULL … NOT VALID).
HAS_NO_NULL = """a.attnotnull AND (a.attrelid, a.attnum) NOT IN (
    SELECT conrelid, unnest(conkey) FROM pg_catalog.pg_constraint WHERE contype = 'n' AND NOT convalidated
)"""

_READ_TYPED = f"""
SELECT a.attrelid::bigint, a.attname, a.attnum, {HAS_NO_NULL}, a.attgenerated = 'v', a.atttypid::bigint, a.atttypmod
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""


def read_typed_attributes(session: Session, relations: Sequence[Relation]) -> dict[int, tuple[TypedAttribute, ...]]:
    """The columns of several tables, by the tables' oids."""
    found: dict[int, list[TypedAttribute]] = {relation.oid: [] for relation in relations}
    with translated("reading the columns of tables"), session.cursor() as cursor:
        cursor.execute(_READ_TYPED, (list(found),))
        for oid, *attribute, type_oid, modifier in cursor:
            found[oid].append(TypedAttribute(Attribute(*attribute), (type_oid, modifier)))
    return {oid: tuple(columns) for oid, columns in found.items()}


# Where row-level security would hide rows, a SELECT of these sessions is an error.
_READ_READABLE = """
SELECT c.oid::bigint
FROM pg_catalog.pg_class AS c
WHERE c.oid = ANY (%s::oid[])
    AND has_table_privilege(c.oid, 'SELECT')
    AND has_schema_privilege(c.relnamespace, 'USAGE')
    AND NOT row_security_active(c.oid)
"""


def read_columns(
    session: Session, attributes: Mapping[int, Sequence[TypedAttribute]], doing: str
) -> dict[int, dict[str, Column]]:
    """The columns of tables that may be read, by oid and name: what ``describe_columns`` gives of each, at once.

    ``attributes`` are the tables' own, by their oids. Left out are tables of which the catalog alone does not tell it:
    those that may not be read, or in part, and those with columns of domains, which a SELECT gives as what they are
    over.
    """
    with translated(doing), session.cursor() as cursor:
        cursor.execute(_READ_READABLE, (list(attributes),))
        readable = [oid for (oid,) in cursor]
    types = list(dict.fromkeys(column.type for oid in readable for column in attributes[oid]))
    facts = dict(zip(types, _read_named_types(session, types, doing), strict=True))
    return {
        oid: {
            c.attribute.name: _column_of(facts[c.type], c.attribute.name, c.attribute.attnum) for c in attributes[oid]
        }
        for oid in readable
        if all(facts[column.type][0].oid == column.type[0] for column in attributes[oid])
    }
