"""Relations in the texts of errors: sorted by name, and no more than can be read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pg_cdc_source.postgres.catalog import Relation

# An error names so many tables and counts the others.
MOST_NAMED = 10


def by_name(relations: Collection[Relation]) -> list[Relation]:
    return sorted(relations, key=lambda relation: (relation.schema, relation.name))


def few(relations: Sequence[Relation]) -> list[Relation]:
    """The relations that an error names."""
    return by_name(relations)[:MOST_NAMED]


def listed(relations: Sequence[Relation]) -> str:
    text = ", ".join(map(str, few(relations)))
    return text if len(relations) <= MOST_NAMED else f"{text} and {len(relations) - MOST_NAMED} more"
