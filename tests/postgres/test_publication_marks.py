"""Marks of publications: what is kept in checkpoints, and what two of them say of what happened between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication import Publication, PublishedTable, find_change, mark_of

A, B = Relation(11, "public", "a", "r"), Relation(12, "public", "b", "r")
NAMES = {11: "public.a", 12: "public.b"}
TABLES = (PublishedTable(A, None, None, (91,), None), PublishedTable(B, ("id",), "(id > 1)", (92, 93), None))
PUBLICATION = Publication(90, "p", False, True, True, True, True, True, True, TABLES)

ATTACHED = (
    "has a partition that was attached to public.a while it has another layout or the publication was not altered in"
    " the same transaction, as PostgreSQL before 15 needs it (ALTER PUBLICATION ... SET (publish_via_partition_root ="
    " true))"
)


def mark(*tables: PublishedTable, **changed: bool | int) -> str:
    return mark_of(replace(PUBLICATION, tables=tables or TABLES, **changed), NAMES)  # type: ignore[arg-type]


def test_a_mark_has_the_publication_its_kinds_and_the_tables_of_the_stream() -> None:
    assert mark() == "90 iudt 11:91 12:92+93rc"
    assert mark_of(PUBLICATION, {11}) == "90 iudt 11:91"
    assert mark(inserts=False, truncates=False) == "90 ud 11:91 12:92+93rc"
    assert mark(replace(TABLES[0], entries=())) == "90 iudt"
    assert mark(replace(TABLES[0], attached=0)) == "90 iudt 11:91@0"
    assert mark(replace(TABLES[1], entries=(), attached=700)) == "90 iudt 12:rc@700"


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ("90 iudt 11:91", "90 iudt 11:91", ""),
        ("90 iudt 11:91", "94 iudt 11:91", "was dropped and created again"),
        ("90 iudt", "90 iu", "leaves out deletes, truncates now"),
        ("90 i", "90 iudt", ""),
        ("90 ", "90 iudt", ""),
        ("90 iudt 11:91", "90 iudt 11:95", "has public.a anew: it was dropped from it and added again"),
        ("90 iudt 11:91+95", "90 iudt 11:95+96", ""),
        ("90 iudt 11:91", "90 iudt 11:91r", "has a row filter for public.a now"),
        ("90 iudt 11:91rc", "90 iudt 11:91c", "has no row filter for public.a now"),
        ("90 iudt 11:91", "90 iudt 11:92c", "has a column list for public.a now"),
        (
            "90 iudt 11:91rc",
            "90 iudt 11:92rc",
            "has public.a anew: it was dropped from it and added again, or given another row filter or column list",
        ),
        ("90 iudt 11:91@0", "90 iudt 11:91@0", ""),
        ("90 iudt 11:91@0", "90 iudt 11:91@3000000000", ATTACHED),
        ("90 iudt 11:91@700", "90 iudt 11:91@701", ATTACHED),
        ("90 iudt 11:91@4294967295", "90 iudt 11:91@3", ATTACHED),
        ("90 iudt 11:91@701", "90 iudt 11:91@700", ""),
        ("90 iudt 11:91@701", "90 iudt 11:91@0", ""),
        ("90 iudt 11:rc@700", "90 iudt 11:rc@701", ATTACHED),
        # A server of a newer version now.
        ("90 iudt 11:91@700", "90 iudt 11:91", ""),
        ("90 iudt", "90 iudt 11:@701", ""),
        # Tables come and go, and an earlier release named none.
        ("90 iudt 11:91", "90 iudt 12:92r", ""),
        ("90 iudt", "90 iudt 11:91 12:92r", ""),
    ],
)
def test_two_marks_say_what_happened_between(before: str, now: str, says: str) -> None:
    assert find_change(before, now, NAMES) == says
