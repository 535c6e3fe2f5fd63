"""Marks of a publication and of its tables, which checkpoints keep, and what happened between two of them.

A gap in what a publication sends leaves no sign in the stream. It leaves one in the catalog: every entry of a
publication has an oid of its own, and every setting the transaction that made it. So a checkpoint keeps both.
"""

from __future__ import annotations

from pg_cdc_source.offsets import XIDS, precedes
from pg_cdc_source.postgres.attached import Attachments
from pg_cdc_source.postgres.publication.entries import Entry
from pg_cdc_source.postgres.publication.read import Publication, PublishedTable

# Before it, an ATTACH needs ALTER PUBLICATION ... SET (see ``before_15``), which so is no sign of a gap.
_SETTINGS_VERSION = 150000

# How many transactions later an entry is written anew that says the same: each new one may end a batch.
_RENEWED_AFTER = 1 << 24

_KINDS = {"i": "inserts", "u": "updates", "d": "deletes", "t": "truncates"}
_ALTERED = "was altered (ALTER PUBLICATION ... SET or OWNER TO), and may have left out changes for a while"


def mark_of(publication: Publication, server_version: int) -> str:
    """The mark that tells a publication from a later one of the same name, and from itself with other settings.

    It is kept in checkpoints: ``16390 iudt 7731`` is the oid, a letter for each kind of change (insert, update, delete,
    truncate), and the transaction that last altered its settings.
    """
    kinds = {"i": publication.inserts, "u": publication.updates, "d": publication.deletes, "t": publication.truncates}
    altered = publication.altered if server_version >= _SETTINGS_VERSION else 0
    return f"{publication.oid} {''.join(letter for letter, sent in kinds.items() if sent)} {altered}"


def entry_of(table: PublishedTable) -> str:
    """How a publication lists a table, as checkpoints keep it."""
    return str(Entry.of(table))


def split_mark(mark: str) -> tuple[str, dict[int, str]]:
    """A mark, and the entries by oid that marks of release 0.1.0 have in it: ``16390 iudt 16384:16391``."""
    words = mark.split(" ")
    listed = [word.partition(":") for word in words if ":" in word]
    return " ".join(word for word in words if ":" not in word), {int(oid): entry for oid, _, entry in listed}


def find_change(mark: str, now: str) -> str:
    """Say what happened to a publication between two marks; empty where it sent everything that it did."""
    oid, sent, altered = _parsed_mark(mark)
    oid_now, sent_now, altered_now = _parsed_mark(now)
    if oid != oid_now:
        return "was dropped and created again"
    lost = [what for letter, what in _KINDS.items() if letter in sent and letter not in sent_now]
    if lost:
        return f"leaves out {', '.join(lost)} now"
    if altered and altered_now and altered != altered_now:
        return _ALTERED
    return ""


def find_left_out(mark: str, entry: str) -> list[str]:
    """The kinds of changes that are not sent of a table. Nothing where the mark is not known."""
    _, sent, _ = _parsed_mark(mark)
    if sent and Entry.parse(entry).inserts_altered is not None:
        sent = "it"  # as the publication for inserts is made
    return [what for letter, what in _KINDS.items() if letter not in sent] if sent else []


def _parsed_mark(mark: str) -> tuple[str, str, int]:
    oid, sent, altered, *_ = [*mark.split(" "), "", ""]
    return oid, sent, int(altered or 0)


def find_flag_change(entry: str, now: str, name: str) -> str:
    """Say whether a publication sends other rows or columns of a table, by what entries of any two servers tell."""
    flags, flags_now = Entry.parse(entry).flags, Entry.parse(now).flags
    for letter, what in (("r", "row filter"), ("c", "column list")):
        if (letter in flags) != (letter in flags_now):
            return f"has {'a' if letter in flags_now else 'no'} {what} for {name} now"
    return ""


def find_table_change(entry: str, now: str, name: str) -> str:
    """Say what happened to a publication's table ``name`` between two entries; empty where all of it was sent."""
    if change := find_flag_change(entry, now, name):
        return change
    then, newest = Entry.parse(entry), Entry.parse(now)
    entries, entries_now = then.listed_by, newest.listed_by
    if entries and entries_now and not any(_is_one(old, new) for old in entries for new in entries_now):
        if {_oid_of(old) for old in entries} & {_oid_of(new) for new in entries_now}:
            return f"has {name} anew: it was in another schema for a while, or detached"
        otherwise = ", or given another row filter or column list" if then.flags else ""
        return f"has {name} anew: it was dropped from it and added again{otherwise}"
    own, own_now = ([e for e in found if "/" not in e] for found in (entries, entries_now))
    if then.flags and own and own_now and not {*own} & {*own_now}:
        # That of its root or schema is the same, and neither filter nor list is of that.
        return f"has {name} anew: it was given another row filter or column list"
    if then.inserts_altered and newest.inserts_altered and then.inserts_altered != newest.inserts_altered:
        return f"has inserts of {name} in a second one, which {_ALTERED}"
    if _is_newer(newest.attached or 0, then.attached or 0):
        return (
            f"has a partition that was attached to {name} while it has another layout or the publication was not "
            "altered in the same transaction, as PostgreSQL before 15 needs it (ALTER PUBLICATION ... SET "
            "(publish_via_partition_root = true))"
        )
    return ""


def attached_before(entry: str, now: str) -> Attachments | None:
    """The partitions of an entry, where another one may have come until the later entry ``now``; else None."""
    then, newest = Entry.parse(entry).partitions, Entry.parse(now).partitions
    return then if then is not None and newest is not None and newest.may_have_more_than(then) else None


def is_same_entry(entry: str, now: str) -> bool:
    """Whether nothing became of a table between two entries."""
    return Entry.parse(entry) == Entry.parse(now)


def renewed(entry: str, now: str) -> str:
    """The entry to go on with. It stays the earlier one where both say the same, unless that is long ago."""
    then, newest = Entry.parse(entry).partitions, Entry.parse(now).partitions
    if then is None or newest is None or not is_same_entry(entry, now):
        return now
    return entry if (newest.horizon - then.horizon) % XIDS < _RENEWED_AFTER else now


def _is_newer(attached: int, than: int) -> bool:
    # An older one remains when the newest partition is detached.
    return attached != 0 and (than == 0 or precedes(than, attached))


def _is_one(entry: str, now: str) -> bool:
    """Whether a table was listed by this entry all the time. Checkpoints of release 0.1.0 have only its oid."""
    return entry == now or entry == _oid_of(now)


def _oid_of(entry: str) -> str:
    return entry.partition("/")[0]
