"""The publication of a stream: read it, plan and make it, choose the tables read through it, and see what became of it.

A publication decides which changes exist for a stream. So whatever it would leave out of a table without a sign is
found here, before anything is read:

- **Partitions.** ``publish_via_partition_root`` decides whether changes come under the root's name or the leaves'. A
  stream reads tables under the names that they are published by. Partitions that write no WAL for logical decoding
  (foreign, unlogged) are published by PostgreSQL without a word and never send a change: refused. One may become such,
  or be created so, while the publication stays as it was.
- **Inheritance.** Changes of children come under the children's names, while a SELECT of the parent has their rows. In
  a stream parent and children are tables of their own: the snapshot reads ONLY the parent, and is published so.
- **Replica identity.** From the moment a publication has a table without one, PostgreSQL refuses UPDATE and DELETE
  there. This package never does that to a production database: it does not create such a publication. With
  ``keyless=insertOnly`` such tables have a second one, which sends neither and stops neither.
- **Identity of partitions.** WAL has the old values of the leaf's identity, pgoutput labels them by the root's. Where
  the leaf's has less, columns would look NULL that are not: refused. Where a stream has begun and its rows say what
  becomes of tables (``onSchemaChange=emit``), such a table leaves it, and the others go on.
- **Row filters, column lists.** A stream has the rows and columns that its publication sends, from its snapshot on.
  The server sends an update that brings a row under a filter as an insert, and one that takes it away as a delete: so
  the rows under the filter are a table of their own. Another filter or list leaves a gap, and so does a table that was
  taken out for a while. Each of them gives the table a new entry in the catalog, by which ``find_table_change``
  notices it.
- **Partitions that had rows.** Those of a table that is attached under a published root were never sent, and nothing
  says so. A root's entry tells those that were there; ``attached_before`` notices another one.
- **Partitions before 15.** See ``before_15``.
"""

from pg_cdc_source.postgres.publication.choose import (
    find_unpublished_parts,
    find_unstreamable,
    meant_by,
    not_published_error,
    require_no_parts,
    require_streamable,
    stream_tables,
)
from pg_cdc_source.postgres.publication.compare import (
    attached_before,
    entry_of,
    find_change,
    find_flag_change,
    find_left_out,
    find_table_change,
    is_same_entry,
    mark_of,
    renewed,
    split_mark,
)
from pg_cdc_source.postgres.publication.entries import Entry
from pg_cdc_source.postgres.publication.identity import ReplicaIdentity, read_identities, without_identity
from pg_cdc_source.postgres.publication.plan import (
    CREATE_AGAIN,
    PlannedPublication,
    ensure_publication,
    plan_publication,
    require_publication,
    require_rights,
)
from pg_cdc_source.postgres.publication.read import Publication, PublishedTable, existing_names, read_publication
from pg_cdc_source.postgres.publication.sent import (
    SentTable,
    Unpublished,
    find_lesser_identities,
    read_sent_tables,
    read_unpublished,
)
from pg_cdc_source.postgres.publication.since_slot import describe_since_slot

__all__ = [
    "CREATE_AGAIN",
    "Entry",
    "PlannedPublication",
    "Publication",
    "PublishedTable",
    "ReplicaIdentity",
    "SentTable",
    "Unpublished",
    "attached_before",
    "describe_since_slot",
    "ensure_publication",
    "entry_of",
    "existing_names",
    "find_change",
    "find_flag_change",
    "find_left_out",
    "find_lesser_identities",
    "find_table_change",
    "find_unpublished_parts",
    "find_unstreamable",
    "is_same_entry",
    "mark_of",
    "meant_by",
    "not_published_error",
    "plan_publication",
    "read_identities",
    "read_publication",
    "read_sent_tables",
    "read_unpublished",
    "renewed",
    "require_no_parts",
    "require_publication",
    "require_rights",
    "require_streamable",
    "split_mark",
    "stream_tables",
    "without_identity",
]
