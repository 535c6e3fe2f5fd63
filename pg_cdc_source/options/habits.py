"""Names that options have in other products, and what to use instead."""

from __future__ import annotations

from pg_cdc_source.options.declared import Group

# By group, in lower case: the name, and the remedy.
_FROM_LOAD = "load() takes no path here: name the table in the option dbtable"
_RANGES = "leave it out: tables are split by physical ranges; partitionBytes or numPartitions sets how many"
_PUSH_DOWN = "leave it out: columns, where and query say what PostgreSQL does"
_WRITING = "leave it out: this format only reads"
_KERBEROS = "leave it out: libpq takes Kerberos credentials from the ticket cache; krbsrvname is an option"
_IN_SPARK = "leave it out: a stream has whole tables; select and filter the DataFrame"
_START = "use startFrom: snapshot, slot or now; after a restart the query continues from its checkpoint"
ONE_OR_SEVERAL_TABLES = "use dbtable for one table, or tables for several: schema.table, schema.*"
_TRIGGER = "leave it out: the query's trigger sets how often a batch runs, maxRowsPerBatch how much it holds"
HABITS: dict[Group, dict[str, str]] = {
    "connection": {
        "dsn": "use url: Spark redacts it in its plans",
        **dict.fromkeys(("username", "database.user"), "use user"),
        "database.hostname": "use host",
        "database.port": "use port",
        "database.password": "use password",
        **dict.fromkeys(("database.dbname", "databasename"), "use database"),
        **dict.fromkeys(
            ("authenticationpluginclassname", "wrapperplugins"),
            "use passwordProvider or passwordCommand, which are asked before each connection",
        ),
        "driver": "leave it out: no JDBC driver is used",
        "sessioninitstatement": "set parameters in the option options: '-c name=value'",
        **dict.fromkeys(("keytab", "principal", "refreshkrb5config", "connectionprovider"), _KERBEROS),
        **dict.fromkeys(("ssl", "database.sslmode"), "use sslmode"),
        "sslfactory": "use sslmode and sslrootcert",
        "currentschema": "qualify the table: schema.table; or set options to '-c search_path=...'",
        "sockettimeout": "leave it out; tcp_user_timeout bounds the wait for a dead server",
        **dict.fromkeys(("connecttimeout", "logintimeout"), "use connect_timeout"),
    },
    "pgsnapshot": {
        "path": _FROM_LOAD,
        "paths": _FROM_LOAD,
        "table": "use dbtable",
        "tables": "load each table on its own, in dbtable: all tables of one action share its snapshot",
        "fetchsize": "leave it out: rows are streamed; batchBytes sets the size of a batch",
        "partitioncolumn": _RANGES,
        "lowerbound": _RANGES,
        "upperbound": _RANGES,
        "predicates": _RANGES,
        **dict.fromkeys(
            ("pushdownpredicate", "pushdownaggregate", "pushdownlimit", "pushdownoffset", "pushdowntablesample"),
            _PUSH_DOWN,
        ),
        "preparequery": "write it into query: WITH ... SELECT ...",
        "customschema": "use asString or numericAs, or cast in query",
        "prefertimestampntz": "leave it out: types follow PostgreSQL's",
        "querytimeout": "leave it out: cancelling the Spark job ends its queries",
        "hint": "leave it out: PostgreSQL has no hints",
        "isolationlevel": "leave it out: an action reads one snapshot",
        **dict.fromkeys(
            ("batchsize", "truncate", "cascadetruncate", "createtableoptions", "createtablecolumntypes"), _WRITING
        ),
    },
    "pgcdc": {
        **dict.fromkeys(
            ("path", "paths"), "load() takes no path here: name the table in dbtable, or several in tables"
        ),
        **dict.fromkeys(("slot.name", "slotname", "slot_name", "replicationslot", "replication_slot"), "use slot"),
        **dict.fromkeys(("publication.name", "publicationname", "publication_name"), "use publication"),
        **dict.fromkeys(("publication_names", "publications"), "use publication: a stream reads one"),
        "publication.autocreate.mode": "use publicationMode: create or require",
        **dict.fromkeys(
            ("plugin.name", "plugin", "proto_version"), "leave it out: streams read PostgreSQL's own pgoutput"
        ),
        "slot.drop.on.stop": "leave it out: the slot is kept; drop it with SELECT pg_drop_replication_slot(...)",
        **dict.fromkeys(
            (
                *("snapshot.mode", "startingoffsets", "startingversion", "startingtimestamp", "startinglsn"),
                *("initialsnapshot", "withinitialsnapshot", "startfromlatest"),
            ),
            _START,
        ),
        **dict.fromkeys(
            ("endingoffsets", "endingversion", "endingtimestamp"),
            "leave it out: a stream has no end; Trigger.AvailableNow stops where the server stands now",
        ),
        **dict.fromkeys(
            ("table", "subscribe", "table.include.list", "table.whitelist", "schema.include.list", "subscribepattern"),
            ONE_OR_SEVERAL_TABLES,
        ),
        **dict.fromkeys(
            ("table.exclude.list", "schema.exclude.list"),
            "name the wanted ones in tables, or leave the others out of the publication: schema.* is what it has",
        ),
        **dict.fromkeys(
            ("query", "where", "columns", "column.include.list", "column.exclude.list", "predicates"), _IN_SPARK
        ),
        **dict.fromkeys(
            (
                "maxoffsetspertrigger",
                "maxrowspertrigger",
                "maxrecordsperbatch",
                "max.batch.size",
                "maxrowsperpartition",
            ),
            "use maxRowsPerBatch",
        ),
        "maxbytespertrigger": "use maxBytesPerBatch",
        **dict.fromkeys(
            ("minoffsetspertrigger", "maxtriggerdelay", "maxfilespertrigger", "poll.interval.ms", "triggerinterval"),
            _TRIGGER,
        ),
        "checkpointlocation": "set it where the query starts: df.writeStream.option('checkpointLocation', ...)",
        "failondataloss": "leave it out: lost data is always an error",
        **dict.fromkeys(
            ("ignoredeletes", "ignorechanges", "skipchangecommits", "skipped.operations"),
            "leave it out: filter the stream by _change_type",
        ),
        **dict.fromkeys(("readchangefeed", "readchangedata"), "leave it out: every row of the stream is a change"),
        "truncate.handling.mode": "use onTruncate: emit, fail or ignore",
        **dict.fromkeys(
            ("message.prefix.include.list", "message.prefixes", "messages"), "use messagePrefixes: prefixes, by commas"
        ),
        "message.prefix.exclude.list": "use messagePrefixes: only messages of its prefixes come",
        "decimal.handling.mode": "use numericAs: string, double or decimal(p,s)",
        **dict.fromkeys(("include.before", "before", "includebefore"), "use beforeImage"),
        "unavailable.value.placeholder": "leave it out: _unchanged lists the columns whose values did not travel",
        **dict.fromkeys(
            ("heartbeat.interval.ms", "heartbeat.action.query"),
            "leave it out: the slot of quiet tables moves with the server's keepalives",
        ),
        "consistentpoint": "leave it out: a stream's snapshot is always exactly where its slot starts",
        "snapshot": "use startFrom: a stream makes the snapshot that belongs to its slot",
        "numpartitions": "use partitionBytes for the initial snapshot; changes come in one sequence",
        "lsncolumn": "leave it out: the column _commit_lsn has it",
    },
}
