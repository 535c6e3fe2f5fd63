"""What a load asks first, in one statement: the server, the relation that a name means, and its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection as Session

from pg_cdc_source.options.names import QualifiedName
from pg_cdc_source.postgres.catalog import (
    FIND_RELATION,
    READ_SERVER,
    Relation,
    Server,
    names_with_schemas,
    relation_of,
    server_of,
)
from pg_cdc_source.postgres.columns import Attribute
from pg_cdc_source.postgres.server_errors import translated
from pg_cdc_source.postgres.services import SERVICES

# A name of NULL means no relation.
_LOOK = f"""
SELECT attribute.*, relation.*, server.*
FROM ({READ_SERVER}) AS server
CROSS JOIN ({FIND_RELATION}) AS relation
CROSS JOIN LATERAL (
    SELECT array_agg(attname::pg_catalog.text ORDER BY attnum), array_agg(attnum ORDER BY attnum),
        array_agg(attnotnull ORDER BY attnum), array_agg(attgenerated = 'v' ORDER BY attnum)
    FROM pg_catalog.pg_attribute
    WHERE attrelid = relation.oid AND attnum > 0 AND NOT attisdropped
) AS attribute
"""
_RELATION_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What was found."""

    server: Server
    attributes: Sequence[Attribute]
    _relation: Sequence[Any]

    def relation(self, session: Session, name: QualifiedName) -> Relation:
        """The relation that ``name`` means, which was looked for. Raises as ``find_relation``."""
        return relation_of(session, name, self._relation)


def look(session: Session, name: QualifiedName | None) -> FirstLook:
    """Look at the server, and for a relation where a name is given."""
    [wanted] = [None] if name is None else names_with_schemas(session, [name])
    with translated("looking at the server"), session.cursor() as cursor:
        cursor.execute(_LOOK, (list(SERVICES), wanted))
        names, attnums, not_null, virtual, *row = cursor.fetchone()
    facts = (names or (), attnums or (), not_null or (), virtual or ())
    attributes = [Attribute(*of) for of in zip(*facts, strict=True)]
    relation, server = row[:_RELATION_COLUMNS], row[_RELATION_COLUMNS:]
    return FirstLook(server_of(server), attributes, relation)
