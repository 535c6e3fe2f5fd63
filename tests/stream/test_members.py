"""What became of a stream's tables between two looks, by what an offset and the catalog say; without a server."""

from __future__ import annotations

from pg_cdc_source.offsets import Lsn, Member
from pg_cdc_source.stream.tables.members import Joined, compare, find_renamed

A, B = Member(11, "public.a", Lsn(5), "91"), Member(12, "public.b", Lsn(7), "92")
NOW = Lsn(100)


def now(*members: Member) -> tuple[Member, ...]:
    """As the catalog gives them: since the look."""
    return tuple(Member(m.oid, m.name, NOW, m.entry) for m in members)


def test_what_is_listed_as_it_was_is_kept_with_its_past() -> None:
    found = compare((A, B), "90 iudt 70", now(A, B), "90 iudt 70", "p")
    assert (found.kept, found.joined, found.left) == ((A, B), (), ())


def test_a_renamed_table_is_the_same() -> None:
    renamed = Member(11, "public.z", Lsn(5), "91")
    assert compare((A,), "90 iudt 70", now(renamed), "90 iudt 70", "p").kept == (renamed,)


def test_a_table_that_takes_over_a_name_joins_unless_the_stream_says_so() -> None:
    swapped = now(Member(11, "public.b", Lsn(5), "91"), Member(12, "public.a", Lsn(7), "92"))
    found = compare((A, B), "90 iudt 70", swapped, "90 iudt 70", "p")
    assert [joined.member for joined in found.joined] == list(swapped)
    assert found.joined[0].why == "public.a was renamed to public.b, and one is another table's name"
    assert [m.name for m in compare((A, B), "", swapped, "", "p", says_names=True).kept] == ["public.b", "public.a"]
    # Its old name is another's now, or the one that had its new name is gone.
    moved = now(Member(11, "public.old", Lsn(5), "91"), Member(13, "public.a", Lsn(7), "93"))
    assert [joined.member for joined in compare((A,), "", moved, "", "p").joined] == list(moved)
    replaced = now(Member(12, "public.a", Lsn(7), "92"))
    found = compare((A, B), "", replaced, "", "p")
    assert ([joined.member for joined in found.joined], found.left) == (list(replaced), (A,))
    assert find_renamed((A, B), swapped) == [("public.a", "public.b"), ("public.b", "public.a")]
    assert find_renamed((A, B), now(A)) == []


def test_a_new_table_joins() -> None:
    found = compare((A,), "90 iudt 70", now(A, B), "90 iudt 70", "p")
    assert (found.kept, found.joined, found.left) == ((A,), (Joined(now(B)[0], ""),), ())


def test_a_table_that_is_not_sent_has_left() -> None:
    found = compare((A, B), "90 iudt 70", now(B), "90 iudt 70", "p")
    assert (found.kept, found.joined, found.left) == ((B,), (), (A,))


def test_another_table_of_the_name_joins_and_the_old_one_has_left() -> None:
    other = Member(13, "public.a", NOW, "")
    found = compare((A, B), "90 iudt 70", (other, *now(B)), "90 iudt 70", "p")
    assert (found.joined, found.left) == ((Joined(other, "public.a was dropped and created again"),), (A,))


def test_another_table_of_the_name_is_new_where_the_old_one_was_renamed_and_the_stream_says_so() -> None:
    renamed, other = Member(A.oid, "public.a_old", NOW, ""), Member(13, "public.a", NOW, "")
    found = compare((A,), "90 iudt 70", (renamed, other), "90 iudt 70", "p", says_names=True)
    assert (found.joined, found.left) == ((Joined(other, ""),), ())


def test_a_table_that_was_out_for_a_while_joins() -> None:
    back = Member(11, "public.a", NOW, "95")
    (joined,) = compare((A, B), "90 iudt 70", (back, *now(B)), "90 iudt 70", "p").joined
    assert joined == Joined(back, "publication p has public.a anew: it was dropped from it and added again")


def test_all_tables_join_where_the_publication_had_a_gap() -> None:
    found = compare((A, B), "90 iudt 70", now(A, B), "90 iudt 71", "p")
    assert found.kept == ()
    assert [joined.why[:26] for joined in found.joined] == ["publication p was altered "] * 2
    # An offset of the first release that knows no mark, and one that has entries in it.
    assert compare((A, B), "", now(A, B), "90 iudt 71", "p").kept == (A, B)
    assert compare((A, B), "90 iudt 11:91", now(A, B), "90 iudt 71", "p").kept == (A, B)
