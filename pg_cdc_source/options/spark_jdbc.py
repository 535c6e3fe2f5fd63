"""Options of Spark's JDBC source: what becomes of each, so that a program of its runs with ``pgsnapshot`` as it is.

Those that do not change which rows come, and as what, are taken, and one warning says what happens instead. The others
are refused, as is every option that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.jdbc import IGNORED_PARAMETERS
from pg_cdc_source.options.value_parsers import boolean

_TIMESTAMP_NTZ = "preferTimestampNTZ"

# Spark's (org.apache.spark.sql.execution.datasources.jdbc.JDBCOptions, 4.0 to 4.3), then pgjdbc's, which Spark passes
# on: options that have the same answer, and the answer.
TAKEN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("driver",), "no JDBC driver is used"),
    (("fetchsize",), "rows are streamed; batchBytes sets the size of a batch"),
    (
        ("partitionColumn", "lowerBound", "upperBound"),
        "a table is split into numPartitions physical ranges; a query is one partition",
    ),
    (
        (
            *("pushDownPredicate", "pushDownAggregate", "pushDownLimit", "pushDownOffset", "pushDownTableSample"),
            "pushDownJoin",
        ),
        "Spark's filters, aggregates and limits are not pushed down; use columns, where and query instead",
    ),
    (("queryTimeout",), "a query has no time limit; cancel the Spark job to end it"),
    ((_TIMESTAMP_NTZ,), "timestamp is always TIMESTAMP_NTZ"),
    (("preferTimestampNanos",), "PostgreSQL's timestamps have microseconds"),
    (
        (
            *("isolationLevel", "batchsize", "truncate", "cascadeTruncate", "createTableOptions"),
            *("createTableColumnTypes", "tableComment"),
        ),
        "this source only reads, and in one snapshot",
    ),
    (
        ("connectTimeout", "loginTimeout"),
        "use connect_timeout for the wait for a connection; its default is 10 s",
    ),
    (tuple(sorted(IGNORED_PARAMETERS - {"queryTimeout"})), "options that tune the JDBC driver have no effect"),
)
_INSTEAD = {name.lower(): (name, instead) for names, instead in TAKEN for name in names}


def is_taken(key: str, text: str) -> bool:
    """Whether an option, given in lower case, is taken without an effect. Raises OptionError if its value is not."""
    if key == _TIMESTAMP_NTZ.lower() and not boolean(text):
        raise OptionError(
            "timestamp is always TIMESTAMP_NTZ here",
            remedy="leave it out, and cast in Spark: the time is then understood in spark.sql.session.timeZone",
        )
    return key in _INSTEAD


def as_written(key: str) -> str:
    """An option's name in Spark's documentation, for the name in lower case that Spark hands over."""
    return _INSTEAD[key][0] if key in _INSTEAD else key


def warning_of(taken: Iterable[str], *, one_partition: bool) -> str:
    """One text for all options that were taken, named in lower case; empty where there are none.

    ``one_partition``: numPartitions was given with a query, which Spark's source also reads as one partition then.
    """
    names: dict[str, list[str]] = {}
    for key in taken:
        names.setdefault(_INSTEAD[key][1], []).append(as_written(key))
    if one_partition:
        names["a query is one partition"] = ["numPartitions"]
    return "; ".join(f"{', '.join(together)}: {instead}" for instead, together in names.items())
