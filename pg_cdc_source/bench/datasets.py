"""The tables that are read. PostgreSQL fills them itself, with the same rows every time."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg2.extensions import connection as Session

# 13 columns of every common kind, some of them NULL, about 140 bytes a row.
WIDE_COLUMNS = (
    "id int NOT NULL, customer bigint NOT NULL, quantity smallint, price numeric(10,2), discount numeric(6,4),"
    " weight double precision, score real, status text, name text, born date, created timestamp, updated timestamptz,"
    " paid boolean"
)
# All columns after the id.
_WIDE_VALUES = """
  (i * 2654435761::bigint) % 1000000007, (i % 1000)::smallint, (i % 1000000) / 100.0,
  CASE WHEN i % 5 = 0 THEN NULL ELSE (i % 10000) / 10000.0 END, i * 1.1, CASE WHEN i % 7 = 0 THEN NULL ELSE i / 3.0 END,
  (ARRAY['placed', 'paid', 'shipped', 'returned'])[1 + i % 4], 'customer number ' || (i * 7919::bigint) % 1000003,
  DATE '1950-01-01' + i % 25000, TIMESTAMP '2020-01-01' + i % 100000000 * INTERVAL '1 s',
  CASE WHEN i % 10 = 0 THEN NULL ELSE TIMESTAMPTZ '2024-01-01 00:00Z' + i % 10000000 * INTERVAL '1.001 s' END, i % 2 = 0
"""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One table. ``share`` is its rows per row that the run asks for; ``key`` the column that JDBC partitions by."""

    name: str
    columns: str
    select: str  # of {rows} rows
    share: float = 1.0
    key: str | None = "id"
    afterwards: tuple[str, ...] = ()

    def rows(self, asked: int) -> int:
        return max(1, int(asked * self.share))

    def rows_between(self, first: str, last: str) -> str:
        """A SELECT of the rows with these numbers, given as SQL."""
        return self.select.replace("generate_series(1, {rows})", f"generate_series({first}, {last})")


def _wide(name: str, columns: str = "", values: str = "", **more: object) -> Dataset:
    return Dataset(
        name,
        columns + WIDE_COLUMNS,
        f"SELECT {values}i, {_WIDE_VALUES} FROM generate_series(1, {{rows}}) AS i",
        **more,  # type: ignore[arg-type]
    )


WIDE = _wide("wide")
UUID_KEY = _wide("uuid_key", "key uuid PRIMARY KEY, ", "md5(i::text)::uuid, ", key=None)
NARROW = Dataset(
    "narrow", "id int NOT NULL, v int NOT NULL", "SELECT i, i * 7 % 1000003 FROM generate_series(1, {rows}) AS i"
)
# 1 to 20 kB of JSON a row, of words that compress as prose does; 1 GB in a full run.
TEXT = Dataset(
    "text_heavy",
    "id int NOT NULL, document jsonb NOT NULL",
    """
    SELECT i, (SELECT jsonb_build_object('id', i, 'paragraphs', jsonb_agg(md5(i::text || k) || ' '
        || repeat((ARRAY['lorem ', 'ipsum ', 'dolor ', 'sit '])[1 + k % 4], 4)))
      FROM generate_series(1, 16 + i * 31 % 320) AS k)
    FROM generate_series(1, {rows}) AS i
    """,
    share=1 / 40,
)
NUMERIC = Dataset(
    "numeric_time",
    "id int NOT NULL, a numeric(12,2), b numeric(18,6), c numeric(38,10), d double precision, e timestamptz,"
    " f timestamp, g date",
    """
    SELECT i, i % 100000000 / 100.0, i * 1.000001, (i::numeric * 12345678901.0123456789) % 1e20, i / 7.0,
      TIMESTAMPTZ '2024-01-01 00:00Z' + i % 10000000 * INTERVAL '1 s',
      TIMESTAMP '2020-01-01' + i % 10000000 * INTERVAL '1 s', DATE '2000-01-01' + i % 9000
    FROM generate_series(1, {rows}) AS i
    """,
)
# 90 % of the rows in 1 % of the key range. The update leaves a dead row for two thirds of the live ones.
SKEWED = Dataset(
    "skewed",
    WIDE_COLUMNS,
    f"""
    SELECT CASE WHEN i <= {{rows}} * 0.9 THEN i ELSE ({{rows}} + (i - {{rows}} * 0.9) * 890)::int END, {_WIDE_VALUES}
    FROM generate_series(1, {{rows}}) AS i
    """,
    afterwards=("UPDATE {table} SET quantity = 1 WHERE customer % 3 > 0", "VACUUM {table}"),
)


def create(session: Session, dataset: Dataset, table: str, rows: int) -> None:
    """Create and fill a table, without WAL, and leave no work to the first reader."""
    with session.cursor() as cursor:
        cursor.execute(f"CREATE UNLOGGED TABLE {table} ({dataset.columns})")
        cursor.execute(f"INSERT INTO {table} {dataset.select.format(rows=rows)}")
        if dataset.key is not None:
            cursor.execute(f"ALTER TABLE {table} ADD PRIMARY KEY ({dataset.key})")
        for statement in dataset.afterwards:
            cursor.execute(statement.format(table=table))
        # Sets the hint bits, which the first reader would otherwise write.
        cursor.execute(f"VACUUM (FREEZE, ANALYZE) {table}")
