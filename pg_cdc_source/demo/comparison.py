"""Tell a true copy of the shop from a torn one: each table against PostgreSQL, and the tables against each other.

A table's contents are its row count and a checksum over all values, computed by PostgreSQL and by Spark. Every
transaction of the shop keeps some rules, so a copy that holds half of a transaction breaks one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg2
from psycopg2.extensions import cursor as Cursor
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from pg_cdc_source.demo.shop import STOCK, TABLES, Opened

# The rules that every transaction of the shop keeps, each as SQL over the copy that counts the rows that break it.
_RULES = {
    "balances only move from customer to customer": """
        SELECT count(*) FROM (SELECT sum(balance) AS total FROM customers)
        WHERE total <> {balance}
    """,
    "an order's total is the sum of its items": """
        SELECT count(*) FROM orders
        FULL JOIN (SELECT order_id, sum(price * quantity) AS of_items FROM items GROUP BY 1) AS i
          ON orders.id = i.order_id
        WHERE NOT total <=> of_items
    """,
    "what was sold has left the stock": """
        SELECT count(*) FROM products
        LEFT JOIN (SELECT product_id, sum(quantity) AS quantity FROM items GROUP BY 1) AS i
          ON products.id = i.product_id
        WHERE stock + sold <> {stock} OR sold <> coalesce(quantity, 0)
    """,
    "each order that was placed left one event": """
        SELECT count(*) FROM
          (SELECT get_json_object(payload, '$.order') AS id FROM events WHERE kind = 'order') AS e
        FULL JOIN (SELECT id FROM orders WHERE id > {orders}) AS o ON o.id = e.id
        WHERE o.id IS NULL OR e.id IS NULL
    """,
}

# How PostgreSQL and Spark write a value of a type for the checksum; all other types print alike. Instants are exact
# microseconds; the doubles here are eighths, exact in thousandths.
_CANONICAL = {
    "timestamptz": ("(extract(epoch FROM {}) * 1000000)::bigint::text", "CAST(unix_micros({}) AS STRING)"),
    "timestamp": (
        "(extract(epoch FROM {}) * 1000000)::bigint::text",
        "CAST(unix_micros(CAST({} AS TIMESTAMP_LTZ)) AS STRING)",
    ),
    "float8": ("({} * 1000)::bigint::text", "CAST(CAST({} * 1000 AS BIGINT) AS STRING)"),
    "_text": ("array_to_string({}, chr(31))", "array_join({}, chr(31))"),
}
_PRINT_ALIKE = ("{}::text", "CAST({} AS STRING)")


@dataclass(frozen=True, slots=True)
class Contents:
    """How many rows a table has, and a checksum over all values that does not depend on the rows' order."""

    rows: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Source:
    """One table as PostgreSQL shows it. ``columns`` are names and PostgreSQL's types."""

    heap_bytes: int
    columns: tuple[tuple[str, str], ...]
    contents: Contents


def read_sources(url: str, snapshot_id: str | None = None) -> dict[str, Source]:
    """What the tables hold now, or under an exported snapshot."""
    with contextlib.closing(psycopg2.connect(url)) as session, session.cursor() as cursor:
        session.set_session(isolation_level="REPEATABLE READ", readonly=True)
        if snapshot_id is not None:
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot_id,))
        return {table: _source(cursor, f"shop.{table}") for table in TABLES}


def _source(cursor: Cursor, table: str) -> Source:
    cursor.execute(
        """
        SELECT a.attname, t.typname
        FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
        ORDER BY attnum
        """,
        (table,),
    )
    columns = tuple((str(name), str(kind)) for name, kind in cursor)
    values = ", ".join(
        f"coalesce({_CANONICAL.get(kind, _PRINT_ALIKE)[0].format(name)}, chr(30))" for name, kind in columns
    )
    # The first 60 bits of a row's MD5, which PostgreSQL and Spark can both read as a number.
    cursor.execute(
        f"""
        WITH heaps (oid) AS (
          SELECT %(table)s::regclass::oid
          UNION ALL
          SELECT inhrelid FROM pg_inherits WHERE inhparent = %(table)s::regclass
        )
        SELECT (SELECT sum(pg_relation_size(oid)) FROM heaps),
               count(*),
               sum(('x' || left(md5(concat_ws(chr(29), {values})), 15))::bit(60)::bigint)
        FROM {table}
        """,
        {"table": table},
    )
    ((heap_bytes, rows, checksum),) = cursor.fetchall()
    return Source(int(heap_bytes), columns, Contents(int(rows), int(checksum)))


def contents_of_copy(rows: DataFrame, source: Source) -> Contents:
    """What a copy of a table holds."""
    values = ", ".join(
        f"coalesce({_CANONICAL.get(kind, _PRINT_ALIKE)[1].format(name)}, chr(30))" for name, kind in source.columns
    )
    checksum = f.expr(f"CAST(conv(left(md5(concat_ws(chr(29), {values})), 15), 16, 10) AS DECIMAL(20, 0))")
    count, total = rows.select(checksum.alias("checksum")).agg(f.count("*"), f.sum("checksum")).collect()[0]
    return Contents(count, int(total or 0))


def broken_rules(spark: SparkSession, copies: Mapping[str, DataFrame], opened: Opened) -> tuple[str, ...]:
    """The rules of the shop that copies of its tables, taken together, break."""
    for table, rows in copies.items():
        rows.createOrReplaceTempView(table)
    started = {"balance": opened.balance, "orders": opened.orders, "stock": STOCK}
    return tuple(rule for rule, query in _RULES.items() if spark.sql(query.format(**started)).head() != (0,))
