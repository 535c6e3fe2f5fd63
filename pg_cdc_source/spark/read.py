"""``read`` and ``stream``: the formats as functions with their options as keywords.

Written by tests/helpers/readme_tables.py from pg_cdc_source/options/declared.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from pyspark.sql import DataFrame, SparkSession

from pg_cdc_source.options.declared import (
    ChangeFormat,
    ConsistentPoint,
    Envelope,
    Keyless,
    OnNewTable,
    OnSchemaChange,
    OnSlotLost,
    OnTruncate,
    PublicationMode,
    StartFrom,
    Unrepresentable,
)
from pg_cdc_source.options.texts import option_texts
from pg_cdc_source.spark.register import ensure_registered

if TYPE_CHECKING:
    from typing import Unpack


class Libpq(TypedDict, total=False):
    """libpq's keywords, which both formats pass on."""

    channel_binding: str | int
    connect_timeout: str | int
    dbname: str | int
    gssdelegation: str | int
    gssencmode: str | int
    gsslib: str | int
    hostaddr: str | int
    keepalives: str | int
    keepalives_count: str | int
    keepalives_idle: str | int
    keepalives_interval: str | int
    krbsrvname: str | int
    load_balance_hosts: str | int
    max_protocol_version: str | int
    min_protocol_version: str | int
    oauth_client_id: str | int
    oauth_client_secret: str | int
    oauth_issuer: str | int
    oauth_scope: str | int
    options: str | int
    passfile: str | int
    require_auth: str | int
    requirepeer: str | int
    service: str | int
    ssl_max_protocol_version: str | int
    ssl_min_protocol_version: str | int
    sslcert: str | int
    sslcertmode: str | int
    sslcompression: str | int
    sslcrl: str | int
    sslcrldir: str | int
    sslkey: str | int
    sslkeylogfile: str | int
    sslmode: str | int
    sslnegotiation: str | int
    sslpassword: str | int
    sslrootcert: str | int
    sslsni: str | int
    target_session_attrs: str | int
    tcp_user_timeout: str | int


def read(
    spark: SparkSession,
    *,
    url: str | None = None,
    host: str | None = None,
    port: int | str | None = None,
    database: str | None = None,
    user: str | None = None,
    password: str | None = None,
    passwordCommand: str | None = None,
    passwordProvider: str | None = None,
    dbtable: str | None = None,
    query: str | None = None,
    columns: str | Sequence[str] | None = None,
    where: str | None = None,
    partitionBytes: int | str | None = None,
    numPartitions: int | str | None = None,
    consistentPoint: ConsistentPoint | None = None,
    slot: str | None = None,
    snapshot: str | None = None,
    lsnColumn: str | None = None,
    asString: str | Sequence[str] | None = None,
    numericAs: str | None = None,
    unrepresentable: Unrepresentable | None = None,
    batchBytes: int | str | None = None,
    slotTimeout: float | str | None = None,
    snapshotIdle: float | str | None = None,
    maxConnections: int | str | None = None,
    **libpq: Unpack[Libpq],
) -> DataFrame:
    """Load a table or query as of one point in time, as the format ``pgsnapshot`` does.

    The arguments are the options of the format; a list is its items with commas between them. libpq's keywords, such as
    ``sslmode``, may be given as well. The session is classic or of Spark Connect; it needs no ``register()``.

    Args:
        spark: the session
        url: libpq URI (``postgresql://…``), libpq connection string (``host=… dbname=…``) or ``jdbc:postgresql://…``
        host: server, or a comma-separated list of servers; default: libpq's
        port: port, or one for each host; default: libpq's
        database: database; libpq's ``dbname`` works too; default: libpq's
        user: role to connect as; default: libpq's
        password: its password; libpq's ``passfile`` works too
        passwordCommand: instead of ``password``: a shell command that prints it; run before each connection, in the
            process that makes the connection
        passwordProvider: instead of ``password``: a Python function that returns it, ``module:function``; called in the
            same way
        dbtable: ``schema.table``, parts quoted as in SQL where needed: plain, partitioned and inherited tables, views,
            materialized views, foreign tables; or ``(SELECT …) AS t``, which is a query
        query: a SELECT instead of ``dbtable``; read as one partition
        columns: columns to read, separated by commas and quoted as in SQL where needed; not with a query; default: all
        where: condition that PostgreSQL applies to the rows; not with a query
        partitionBytes: size of the part of a table that one task reads, 8kB to 32TB; larger if the table would have
            more than 100,000 parts; not with a query; default: ``64MB``
        numPartitions: instead of ``partitionBytes``: number of parts, 1 to 100,000; no effect on a query
        consistentPoint: ``auto``: if ``lsnColumn`` or ``open_snapshot()`` shows the LSN, find it through a temporary
            slot; read without an LSN if role or ``wal_level`` do not allow the slot or it is not there within
            ``slotTimeout``; ``require``: fail without an LSN; ``off``: never look for it; not with ``snapshot``;
            default: ``auto``
        slot: create this durable replication slot with the snapshot and keep it, for a stream that starts where the
            snapshot ends; an error if it exists; not with ``snapshot`` or ``consistentPoint=off``
        snapshot: read this exported snapshot instead of making one
        lsnColumn: add a BIGINT column of this name with the snapshot's LSN (null if it is not known)
        asString: columns to read as PostgreSQL's own text
        numericAs: type of a ``numeric`` whose declaration does not fit DECIMAL: ``string``, ``double`` or
            ``decimal(p,s)``; default: ``string``
        unrepresentable: what a value becomes that its Spark type cannot hold (infinity, NaN in a DECIMAL, a date out of
            range, an array of other dimensions): ``error`` or ``null``; default: ``error``
        batchBytes: size of the Arrow batches handed to Spark, 64kB to 512MB; default: ``4MB``
        slotTimeout: longest wait for a slot, 100ms to 1d; not with ``snapshot`` or ``consistentPoint=off``; default:
            ``10s``
        snapshotIdle: how long a snapshot stays open after its last reader, 1s to 1d; not with ``snapshot``; default:
            ``60s``
        maxConnections: most sessions of one driver for planning and for holding snapshots, of all actions together, 4
            to 100,000; further actions share a session or wait in line. Each running task has one more; default: a
            third of what the server has left
    """
    given = dict(locals())
    named = {name: value for name, value in given.items() if name not in ("spark", "libpq")}
    ensure_registered(spark)
    return spark.read.format("pgsnapshot").options(**option_texts({**named, **libpq})).load()


def stream(
    spark: SparkSession,
    *,
    url: str | None = None,
    host: str | None = None,
    port: int | str | None = None,
    database: str | None = None,
    user: str | None = None,
    password: str | None = None,
    passwordCommand: str | None = None,
    passwordProvider: str | None = None,
    dbtable: str | None = None,
    tables: str | Sequence[str] | None = None,
    slot: str,
    failover: bool | None = None,
    publication: str | None = None,
    publicationMode: PublicationMode | None = None,
    keyless: Keyless | None = None,
    startFrom: StartFrom | None = None,
    maxRowsPerBatch: int | str | None = None,
    maxBytesPerBatch: int | str | None = None,
    changeFormat: ChangeFormat | None = None,
    envelope: Envelope | None = None,
    beforeImage: bool | None = None,
    onSchemaChange: OnSchemaChange | None = None,
    onTruncate: OnTruncate | None = None,
    messagePrefixes: str | Sequence[str] | None = None,
    onNewTable: OnNewTable | None = None,
    onSlotLost: OnSlotLost | None = None,
    asString: str | Sequence[str] | None = None,
    numericAs: str | None = None,
    unrepresentable: Unrepresentable | None = None,
    partitionBytes: int | str | None = None,
    slotTimeout: float | str | None = None,
    **libpq: Unpack[Libpq],
) -> DataFrame:
    """Load tables and their changes as a stream, as the format ``pgcdc`` does.

    The arguments are the options of the format; a list is its items with commas between them. libpq's keywords, such as
    ``sslmode``, may be given as well. The session is classic or of Spark Connect; it needs no ``register()``.

    Args:
        spark: the session
        url: libpq URI (``postgresql://…``), libpq connection string (``host=… dbname=…``) or ``jdbc:postgresql://…``
        host: server, or a comma-separated list of servers; default: libpq's
        port: port, or one for each host; default: libpq's
        database: database; libpq's ``dbname`` works too; default: libpq's
        user: role to connect as; default: libpq's
        password: its password; libpq's ``passfile`` works too
        passwordCommand: instead of ``password``: a shell command that prints it; run before each connection, in the
            process that makes the connection
        passwordProvider: instead of ``password``: a Python function that returns it, ``module:function``; called in the
            same way
        dbtable: one table, ``schema.table``, parts quoted as in SQL where needed: its columns and the change columns
        tables: instead of ``dbtable``: several tables, separated by commas; ``schema.*`` means the tables of a schema
            that the publication has, and ``-schema.table`` leaves one of them out; rows have the columns of the
            envelope
        slot: replication slot of the stream; created when missing, kept when the query stops
        failover: create a slot that standbys keep a copy of (PostgreSQL 17 and later); after a failover the stream
            continues from the copy. Not with ``startFrom=slot``, unless ``onSlotLost=resnapshot``; default: ``false``
        publication: publication of the tables; created when missing, kept when the query stops; default: the slot's
            name
        publicationMode: ``create``: create a publication that is missing; ``require``: only check it; default:
            ``create``
        keyless: when the publication is created and tables have no usable replica identity (primary key or ``REPLICA
            IDENTITY FULL``): ``fail``, or ``insertOnly``: publish their inserts and truncates in a second publication,
            named with the suffix ``_inserts``; default: ``fail``
        startFrom: ``snapshot``: first the rows of the tables, then every change after them; ``slot``: the changes from
            the position of the existing slot; ``now``: the changes from now on; default: ``snapshot``
        maxRowsPerBatch: most rows of changes in a micro-batch, 1 to 1,000,000,000; it ends at a commit unless one
            transaction is larger than the limit; default: ``1000000``
        maxBytesPerBatch: most bytes of changes in a micro-batch, 64kB to 16GB, in the same way; tables of a snapshot
            share a micro-batch up to this size; default: ``128MB``
        changeFormat: with ``dbtable``: ``plain``: each change is a row with the change columns; ``changelog``: rows and
            columns are those of Spark's ``CHANGES`` and Delta's change data feed. ``changelog`` needs ``REPLICA
            IDENTITY FULL``, and does not allow ``beforeImage``, ``onTruncate=emit``, ``onNewTable=snapshot`` and
            ``onSlotLost=resnapshot``; default: ``plain``
        envelope: with ``tables``: ``json``: each change is a row; ``arrow``: a row is a run of one table's changes,
            with its layout and Arrow IPC bytes; default: ``json``
        beforeImage: with ``dbtable``: add ``_before``, a struct of the old values that PostgreSQL sent; default:
            ``false``
        onSchemaChange: when a table's columns change: ``fail``, or ``ignore`` columns that were added, or, only with
            ``tables``, ``emit`` a row that describes the columns from there on; default: ``fail``
        onTruncate: when a table is truncated: ``emit`` a row that says so, ``fail``, or ``ignore`` it. The default of a
            changelog is ``fail``; default: ``emit``
        messagePrefixes: with ``tables``: prefixes of logical decoding messages (``pg_logical_emit_message()``,
            PostgreSQL 14 and later), separated by commas, that come as rows with the change type ``message``
        onNewTable: when a table joins the stream, or comes back: ``snapshot`` reads its rows and then its changes,
            ``changes`` reads a new table from its first change on, or ``fail``; default: ``snapshot`` with ``tables``,
            ``fail`` with ``dbtable``
        onSlotLost: when the slot is gone, or has lost changes: ``fail``, or ``resnapshot``: create a new slot and read
            all rows again; default: ``fail``
        asString: with ``dbtable``: columns to read as PostgreSQL's own text
        numericAs: with ``dbtable``: type of a ``numeric`` whose declaration does not fit DECIMAL: ``string``,
            ``double`` or ``decimal(p,s)``; default: ``string``
        unrepresentable: with ``dbtable``: what a value becomes that its Spark type cannot hold (infinity, NaN in a
            DECIMAL, a date out of range, an array of other dimensions): ``error`` or ``null``; default: ``error``
        partitionBytes: size of the part of a table that one task of a snapshot reads, 8kB to 32TB. Only if rows of
            tables are read (``startFrom=snapshot``, ``onNewTable=snapshot`` or ``onSlotLost=resnapshot``); default:
            ``64MB``
        slotTimeout: longest wait for the creation of the stream's slot, 100ms to 1d; 600 s for tables that join. Not
            with ``startFrom=slot``, unless ``onNewTable=snapshot`` or ``onSlotLost=resnapshot``; default: ``10s``
    """
    given = dict(locals())
    named = {name: value for name, value in given.items() if name not in ("spark", "libpq")}
    ensure_registered(spark)
    return spark.readStream.format("pgcdc").options(**option_texts({**named, **libpq})).load()
