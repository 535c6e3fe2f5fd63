"""Names that options have in other products, and what to use instead."""

from __future__ import annotations

from pg_cdc_source.options.declared import Group

_FROM_LOAD = "load() takes no path here; name the table in the option dbtable"
_KERBEROS = "leave it out: libpq takes Kerberos credentials from the ticket cache; krbsrvname is an option"
_IN_SPARK = (
    "leave it out: a stream has the columns and rows that its publication has (PostgreSQL 15: column lists, row "
    "filters); or select and filter the DataFrame"
)
_START = "use startFrom: snapshot, slot or now; after a restart the query continues from its checkpoint"
ONE_OR_SEVERAL_TABLES = "use dbtable for one table, or tables for several: schema.table, schema.*"
_TRIGGER = "leave it out: the query's trigger sets how often a batch runs, maxRowsPerBatch how much it holds"
# By group: the name as its product writes it, and the remedy.
HABITS: dict[Group, dict[str, str]] = {
    "connection": {
        "dsn": "use url: Spark redacts it in its plans",
        **dict.fromkeys(("username", "database.user"), "use user"),
        **dict.fromkeys(("database.hostname", "hostname"), "use host"),
        "database.port": "use port",
        "database.password": "use password",
        **dict.fromkeys(("database.dbname", "databaseName", "database-name"), "use database"),
        **dict.fromkeys(
            ("authenticationPluginClassName", "wrapperPlugins"),
            "use passwordProvider or passwordCommand, which are asked before each connection",
        ),
        "driver": "leave it out: no JDBC driver is used",
        "sessionInitStatement": "set parameters in the option options: '-c name=value'; those that the connector sets "
        "itself, such as TimeZone, are refused",
        **dict.fromkeys(("keytab", "principal", "refreshKrb5Config", "connectionProvider"), _KERBEROS),
        **dict.fromkeys(("ssl", "database.sslmode"), "use sslmode"),
        "sslfactory": "use sslmode and sslrootcert",
        "currentSchema": "qualify the table: schema.table; or set options to '-c search_path=...'",
        "socketTimeout": "leave it out; tcp_user_timeout bounds the wait for a dead server",
        **dict.fromkeys(("connectTimeout", "loginTimeout"), "use connect_timeout"),
    },
    "pgsnapshot": {
        "path": _FROM_LOAD,
        "paths": _FROM_LOAD,
        "table": "use dbtable",
        "tables": "load each table on its own, in dbtable: all tables of one action share its snapshot",
        "predicates": "use where to choose rows; a table is split into physical ranges",
        "prepareQuery": "write it into query: WITH ... SELECT ...",
        "customSchema": "use asString or numericAs, or cast in query",
        "hint": "leave it out: PostgreSQL has no hints",
    },
    "pgcdc": {
        **dict.fromkeys(
            ("path", "paths"), "load() takes no path here: name the table in dbtable, or several in tables"
        ),
        **dict.fromkeys(("slot.name", "slotName", "slot_name", "replicationSlot", "replication_slot"), "use slot"),
        **dict.fromkeys(("publication.name", "publicationName", "publication_name"), "use publication"),
        **dict.fromkeys(
            ("publication_names", "publications"),
            "use publication: it names one (keyless=insertOnly adds a second one by itself)",
        ),
        "publication.autocreate.mode": "use publicationMode: create or require",
        **dict.fromkeys(
            ("plugin.name", "plugin", "proto_version", "decoding.plugin.name"),
            "leave it out: streams read PostgreSQL's own pgoutput",
        ),
        "slot.drop.on.stop": "leave it out: the slot is kept; drop it with SELECT pg_drop_replication_slot(...)",
        **dict.fromkeys(
            (
                *("scan.startup.mode", "startingOffsets", "startingVersion", "startingTimestamp", "startingLsn"),
                *("initialSnapshot", "withInitialSnapshot", "startFromLatest"),
            ),
            _START,
        ),
        "snapshot.mode": f"{_START}; onSlotLost=resnapshot reads all rows again where the slot is lost (when_needed)",
        **dict.fromkeys(
            ("endingOffsets", "endingVersion", "endingTimestamp"),
            "leave it out: a stream has no end; Trigger.AvailableNow stops where the server stands now",
        ),
        **dict.fromkeys(
            (
                *("table", "subscribe", "table.include.list", "table.whitelist", "schema.include.list"),
                *("subscribePattern", "schema-name", "table-name"),
            ),
            ONE_OR_SEVERAL_TABLES,
        ),
        **dict.fromkeys(
            ("table.exclude.list", "schema.exclude.list"),
            "leave them out in tables: schema.*, -schema.table",
        ),
        **dict.fromkeys(
            ("query", "where", "columns", "column.include.list", "column.exclude.list", "predicates"), _IN_SPARK
        ),
        **dict.fromkeys(
            (
                "maxOffsetsPerTrigger",
                "maxRowsPerTrigger",
                "maxRecordsPerBatch",
                "max.batch.size",
                "maxRowsPerPartition",
            ),
            "use maxRowsPerBatch",
        ),
        "maxBytesPerTrigger": "use maxBytesPerBatch",
        **dict.fromkeys(
            ("minOffsetsPerTrigger", "maxTriggerDelay", "maxFilesPerTrigger", "poll.interval.ms", "triggerInterval"),
            _TRIGGER,
        ),
        "checkpointLocation": "set it where the query starts: df.writeStream.option('checkpointLocation', ...)",
        "failOnDataLoss": "use onSlotLost: fail, or resnapshot, which reads all tables again",
        **dict.fromkeys(
            ("ignoreDeletes", "ignoreChanges", "skipChangeCommits", "skipped.operations"),
            "leave it out: filter the stream by _change_type",
        ),
        **dict.fromkeys(
            ("readChangeFeed", "readChangeData"),
            "leave it out; changeFormat=changelog gives the columns of Delta's change data feed",
        ),
        "truncate.handling.mode": "use onTruncate: emit, fail or ignore",
        **dict.fromkeys(
            ("message.prefix.include.list", "message.prefixes", "messages"), "use messagePrefixes: prefixes, by commas"
        ),
        "message.prefix.exclude.list": "use messagePrefixes: only messages of its prefixes come",
        **dict.fromkeys(
            ("signal.data.collection", "signal.enabled.channels"),
            "leave it out: pg-cdc resnapshot, or a message in SQL, asks for a table's rows again",
        ),
        "snapshot.select.statement.overrides": "use a row filter of the publication (PostgreSQL 15)",
        "replica.identity.autoset.values": "leave it out: ALTER TABLE ... REPLICA IDENTITY says it in PostgreSQL",
        "tombstones.on.delete": "leave it out: a delete is one row",
        **dict.fromkeys(
            ("topic.prefix", "database.server.name"), "leave it out: with tables, rows say their table in _table"
        ),
        **dict.fromkeys(
            ("lsn.flush.mode", "status.update.interval.ms"),
            "leave it out: the slot moves when Spark has committed a batch",
        ),
        **dict.fromkeys(
            ("scan.incremental.snapshot.enabled", "snapshot.fetch.size", "scan.incremental.snapshot.chunk.size"),
            "use partitionBytes for the initial snapshot",
        ),
        **dict.fromkeys(
            ("time.precision.mode", "hstore.handling.mode", "interval.handling.mode", "binary.handling.mode"),
            "leave it out: docs/types.md says what each type is",
        ),
        "decimal.handling.mode": "use numericAs: string, double or decimal(p,s)",
        **dict.fromkeys(("include.before", "before", "includeBefore"), "use beforeImage"),
        "unavailable.value.placeholder": "leave it out: _unchanged lists the columns that PostgreSQL did not send",
        **dict.fromkeys(
            ("heartbeat.interval.ms", "heartbeat.action.query"),
            "leave it out: the slot also moves while the tables are quiet, with the server's keepalives",
        ),
        "consistentPoint": "leave it out: a stream's snapshot is always exactly where its slot starts",
        "snapshot": "use startFrom: a stream makes the snapshot that belongs to its slot",
        "numPartitions": "use partitionBytes for the initial snapshot; changes come in one sequence",
        "lsnColumn": "leave it out: the column _commit_lsn has it",
    },
}
