"""Relations in the texts of errors: sorted by name, and no more than can be read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pg_cdc_source.options import names
from pg_cdc_source.postgres.catalog import Relation


def by_name(relations: Collection[Relation]) -> list[Relation]:
    return sorted(relations, key=lambda relation: (relation.schema, relation.name))


def few(relations: Sequence[Relation]) -> list[Relation]:
    """The relations that an error names."""
    return by_name(relations)[: names.MOST_LISTED]


def listed(relations: Collection[Relation]) -> str:
    return names.listed(map(str, by_name(relations)))
