"""Marks of publications: what is kept in checkpoints, and what two of them say of what happened between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_cdc_source.postgres.attached import Attachments
from pg_cdc_source.postgres.catalog import Relation
from pg_cdc_source.postgres.publication import (
    Publication,
    PublishedTable,
    attached_before,
    entry_of,
    find_change,
    find_table_change,
    mark_of,
    renewed,
    split_mark,
)

A, B = Relation(11, "public", "a", "r"), Relation(12, "public", "b", "r")
TABLES = (PublishedTable(A, None, None, ("91",), None), PublishedTable(B, ("id",), "(id > 1)", ("92", "93"), None))
SEEN = Attachments("e0ca", 7)
PUBLICATION = Publication(90, "p", False, True, True, True, True, True, True, TABLES, 70)

ATTACHED = (
    "has a partition that was attached to public.a while it has another layout or the publication was not altered in"
    " the same transaction, as PostgreSQL before 15 needs it (ALTER PUBLICATION ... SET (publish_via_partition_root ="
    " true))"
)
ALTERED = "was altered (ALTER PUBLICATION ... SET or OWNER TO), and may have left out changes for a while"


def mark(version: int = 150000, **changed: bool | int) -> str:
    return mark_of(replace(PUBLICATION, **changed), version)  # type: ignore[arg-type]


def test_a_mark_has_the_publication_its_kinds_and_its_settings() -> None:
    assert mark() == "90 iudt 70"
    assert mark(inserts=False, truncates=False) == "90 ud 70"
    assert mark(140000) == "90 iudt 0"


def test_an_entry_has_what_lists_a_table() -> None:
    assert [entry_of(table) for table in TABLES] == ["91", "92+93rc"]
    assert entry_of(replace(TABLES[0], entries=())) == ""
    assert entry_of(replace(TABLES[0], attached=0)) == "91@0"
    assert entry_of(replace(TABLES[1], entries=(), attached=700)) == "rc@700"
    assert entry_of(replace(TABLES[0], inserts_only=True, altered=70)) == "91i70"
    assert entry_of(replace(TABLES[1], attached=0, inserts_only=True)) == "92+93rc@0i0"
    assert entry_of(replace(TABLES[1], attached=5, partitions=SEEN, inserts_only=True)) == "92+93rc@5p7.e0cai0"


@pytest.mark.parametrize(
    ("before", "now", "seen"),
    [
        ("91p700.e0ca", "91p701.3bc0", "700.e0ca"),
        ("91@3p700.e0ca.703.704i5", "91@3p701.3bc0i5", "700.e0ca.703.704"),
        ("91p4294967290.0", "91p3.e0ca", "4294967290.0"),
        # None was attached or has left, or none is there.
        ("91p700.e0ca.703", "91p701.e0ca", None),
        ("91p700.e0ca", "91p701.0", None),
        # Of a release that knew the last one alone.
        ("91p0", "91p700.e0ca", "0"),
        ("91p700", "91p701.3bc0", "700"),
        ("91p700", "91p701.0", None),
        # Of a release that did not look.
        ("91", "91p700.e0ca", None),
        ("91@700", "91@701", None),
    ],
)
def test_an_entry_tells_whether_partitions_were_attached(before: str, now: str, seen: str | None) -> None:
    found = attached_before(before, now)
    assert (found and str(found)) == seen


@pytest.mark.parametrize(
    ("entry", "now", "kept"),
    [
        # The same ones, and the transactions that have come are few: a new text would be a batch of its own.
        ("91p700.e0ca.703", "91p16777915.e0ca", True),
        ("91p700.e0ca.703", "91p16777916.e0ca", False),
        ("91p4294967290.e0ca", "91p3.e0ca", True),
        ("91p3.e0ca", "91p4294967290.e0ca", False),
        ("91p700.e0ca", "91p701.3bc0", False),
        ("91p700.e0ca", "92p701.e0ca", False),
        ("91p700", "91p701.e0ca", False),
        ("91", "91p701.e0ca", False),
        ("91", "91", True),
    ],
)
def test_an_entry_is_written_anew_where_it_says_more_or_is_old(entry: str, now: str, kept: bool) -> None:
    assert renewed(entry, now) == (entry if kept else now)


def test_the_last_transaction_of_an_older_release_is_known() -> None:
    assert Attachments.parse("700").recent == (700,)
    assert Attachments.parse("700.e0ca.703.704") == Attachments("e0ca", 700, (703, 704))
    for text in ("0", "700", "700.0", "700.e0ca", "700.e0ca.703.704"):
        assert str(Attachments.parse(text)) == text


def test_marks_of_the_first_release_have_entries() -> None:
    assert split_mark("90 iudt 11:91 12:92+93rc") == ("90 iudt", {11: "91", 12: "92+93rc"})
    assert split_mark("90 iudt 70") == ("90 iudt 70", {})
    assert split_mark("90 ") == ("90 ", {})
    assert split_mark("90  12:rc@700") == ("90 ", {12: "rc@700"})


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ("90 iudt 70", "90 iudt 70", ""),
        ("90 iudt 70", "94 iudt 70", "was dropped and created again"),
        ("90 iudt 70", "90 iu 71", "leaves out deletes, truncates now"),
        ("90 iudt 70", "90 iudt 71", ALTERED),
        ("90 i 70", "90 iudt 71", ALTERED),
        ("90 i", "90 iudt 71", ""),
        ("90 ", "90 iudt 70", ""),
        # A server of a newer version now, or an older one.
        ("90 iudt 0", "90 iudt 71", ""),
        ("90 iudt 71", "90 iudt 0", ""),
    ],
)
def test_two_marks_say_what_happened_between(before: str, now: str, says: str) -> None:
    assert find_change(before, now) == says


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ("91", "91", ""),
        ("91", "95", "has public.a anew: it was dropped from it and added again"),
        ("91+95", "95+96", ""),
        # By another entry all the time, which has no part in the filter.
        ("91+95/700r", "92+95/700r", "has public.a anew: it was given another row filter or column list"),
        ("91+95/700c", "91+96/701c", ""),
        ("95/700r", "95/700r", ""),
        ("91+95r", "91+95/700r", ""),
        ("91/700", "91/700", ""),
        ("91/700", "91/701", "has public.a anew: it was in another schema for a while, or detached"),
        ("91/700+92", "91/701+92", ""),
        ("91/700", "92", "has public.a anew: it was dropped from it and added again"),
        ("91", "91/700", ""),
        ("91", "91r", "has a row filter for public.a now"),
        ("91rc", "91c", "has no row filter for public.a now"),
        ("91", "92c", "has a column list for public.a now"),
        (
            "91rc",
            "92rc",
            "has public.a anew: it was dropped from it and added again, or given another row filter or column list",
        ),
        ("91@0", "91@0", ""),
        ("91@0", "91@3000000000", ATTACHED),
        ("91@700", "91@701", ATTACHED),
        ("91@4294967295", "91@3", ATTACHED),
        ("91@701", "91@700", ""),
        ("91@701", "91@0", ""),
        ("rc@700", "rc@701", ATTACHED),
        # A server of a newer version now.
        ("91@700", "91", ""),
        # Of a publication for inserts.
        ("91i70", "91i70", ""),
        ("91i70", "91i71", f"has inserts of public.a in a second one, which {ALTERED}"),
        ("91@700i70", "91@701i70", ATTACHED),
        (
            "91rci70",
            "92rci70",
            "has public.a anew: it was dropped from it and added again, or given another row filter or column list",
        ),
        ("91i0", "91i71", ""),
        # All tables are published.
        ("", "", ""),
    ],
)
def test_two_entries_say_what_happened_between(before: str, now: str, says: str) -> None:
    assert find_table_change(before, now, "public.a") == says
