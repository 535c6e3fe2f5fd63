"""The tables of a shop that has nearly everything that a table can have, and how values of their columns are made.

In a value, ``$k`` stands for the number of a key and ``$n`` for any number.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS = 40


@dataclass(frozen=True)
class Table:
    """``columns`` are names with types and values; the first ``key`` of them tell rows apart. None: not written.

    ``behind`` is what stands behind the columns, ``further`` are statements that follow.
    """

    name: str
    columns: tuple[tuple[str, str | None], ...]
    key: int = 1
    constraint: str | None = None
    behind: str = ""
    further: tuple[str, ...] = ()
    flips: bool = False  # its first column is a number, and may be negative

    def statements(self) -> list[str]:
        """Statements that create it."""
        columns = [column for column, _ in self.columns]
        names = [name_of(column) for column in columns[: self.key]]
        constraint = f"PRIMARY KEY ({', '.join(names)})" if self.constraint is None else self.constraint
        parts = ", ".join([*columns, constraint] if constraint else columns)
        return [f"CREATE TABLE {self.name} ({parts}){self.behind}", *self.further]


def name_of(column: str) -> str:
    """A column's name as a statement has it."""
    return column[: column.index('"', 1) + 1] if column.startswith('"') else column.split()[0]


TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
    "CREATE DOMAIN quantity AS int CHECK (VALUE > -1000000000)",
    "CREATE TYPE address AS (street text, number int)",
)
_LARGE = "(SELECT $n || string_agg(md5(i::text || $n), '') FROM generate_series(1, 120) AS i)"
_MOOD = "(ARRAY['sad', 'ok', 'happy'])[1 + $n % 3]::mood"
_TEXT = "(ARRAY[NULL, '', ' ', 'ä' || $n, 'null', $n::text, E'a\\n\\t''\"\\\\', '{}'])[1 + $n % 8]"


def _documents(name: str, *further: str) -> Table:
    columns = (
        ("id int", "$k"),
        ("title text", "'title ' || $n"),
        ("body text", _LARGE),
        ("summary text", f"CASE $n % 3 WHEN 0 THEN NULL WHEN 1 THEN 'short' ELSE {_LARGE} END"),
    )
    external = tuple(f"ALTER TABLE {name} ALTER {column} SET STORAGE EXTERNAL" for column in ("body", "summary"))
    return Table(name, columns, further=(*external, *further), flips=True)


KEYLESS = Table(
    "log",
    (("at timestamptz", "'2026-01-01Z'::timestamptz + $n * interval '1 s'"), ("v text", _TEXT)),
    constraint="",
    further=("ALTER TABLE log REPLICA IDENTITY FULL",),
)

# Where rows vanish with those that they belong to.
ADDRESSES = Table(
    "addresses",
    (("customer int", "$k"), ("kind mood", _MOOD), ("place address", "ROW('Street ' || $n, $n)::address")),
    key=2,
    constraint="PRIMARY KEY (customer, kind), "
    "FOREIGN KEY (customer) REFERENCES customers ON DELETE CASCADE ON UPDATE CASCADE",
)

# fmt: off
TABLES = (
    Table(
        "customers",
        (
            ("id int", "$k"),
            ("name text NOT NULL", "'customer ' || $n"),
            ("joined timestamptz", "'2026-01-01Z'::timestamptz + $n * interval '1 ms'"),
            ("tags text[]", f"CASE $n % 3 WHEN 0 THEN '{{}}' ELSE ARRAY['a', NULL, {_TEXT}] END"),
            ("is_active boolean", "(ARRAY[true, false, NULL])[1 + $n % 3]"),
            ("level smallint DEFAULT 3", "$n % 100"),
        ),
        flips=True,
    ),
    ADDRESSES,
    Table(
        "items",
        (
            ("order_id bigint", "$k / 3"),
            ("line int", "$k % 3"),
            ("price numeric(10, 2)", "$n * 0.01"),
            ("note text", _TEXT),
            ("amount quantity", "$n"),
        ),
        key=2,
        flips=True,
    ),
    _documents("documents"),
    _documents("documents_full", "ALTER TABLE documents_full REPLICA IDENTITY FULL"),
    Table(
        "files",
        (
            ("folder text", "'folder ' || $k % 4"),
            ("file text", "'file ' || $k"),
            ("content bytea", f"convert_to({_LARGE}, 'UTF8')"),
            ("is_read boolean", "$n % 2 = 0"),
        ),
        key=2,
        further=("ALTER TABLE files ALTER content SET STORAGE EXTERNAL",),
    ),
    Table(
        "events",
        (("day date", "date '2026-01-01' + $k % 20"), ("id bigint", "$k"), ("what text", _LARGE), ("n int", "$n")),
        key=2,
        behind=" PARTITION BY RANGE (day)",
        further=(
            "ALTER TABLE events ALTER what SET STORAGE EXTERNAL",
            *(
                f"CREATE TABLE events_{i} PARTITION OF events FOR VALUES FROM ('2026-01-0{i}') TO ('2026-01-0{i + 3}')"
                for i in (1, 4)
            ),
            "CREATE TABLE events_rest PARTITION OF events DEFAULT",
        ),
    ),
    Table(
        "readings",
        (
            ("sensor text", "(ARRAY['a', 'b', 'c'])[1 + $k % 3]"),
            ("id int", "$k"),
            ("value float8", "$n / 7.0"),
            ("of mood", _MOOD),
        ),
        key=2,
        behind=" PARTITION BY LIST (sensor)",
        further=(
            "CREATE TABLE readings_a PARTITION OF readings FOR VALUES IN ('a')",
            "CREATE TABLE readings_bc PARTITION OF readings FOR VALUES IN ('b', 'c') PARTITION BY HASH (id)",
            *(
                f"CREATE TABLE readings_bc_{i} PARTITION OF readings_bc FOR VALUES WITH (MODULUS 2, REMAINDER {i})"
                for i in (0, 1)
            ),
        ),
    ),
    KEYLESS,
    Table(
        "moods",
        (
            ("feels mood", "(ARRAY['sad', 'ok', 'happy'])[1 + $k % 3]::mood"),
            ("id int", "$k"),
            ("others mood[]", f"ARRAY[NULL, {_MOOD}]"),
            ("v varchar(40)", _TEXT),
        ),
        key=2,
    ),
    Table(
        "lists",
        (
            ("id int", "$k"),
            ("numbers int[]", "ARRAY[$n, NULL, -$n]"),
            ("texts text[]", f"ARRAY[{_TEXT}, 'a,b', '\"', NULL, 'NULL']"),
            ("amounts numeric(12, 3)[]", "ARRAY[$n * 0.001, NULL]"),
            ("times timestamptz[]", "ARRAY['2026-01-01Z'::timestamptz + $n * interval '1 s']"),
            ("rows bytea[]", "ARRAY[decode(md5($n::text), 'hex'), NULL, '']"),
        ),
        flips=True,
    ),
    Table(
        "sums",
        (
            ("id int", "$k"),
            ("a int", "$n"),
            ("b int", "$n % 7"),
            ("total int GENERATED ALWAYS AS (a + b) STORED", None),
            ("v text", _TEXT),
        ),
        flips=True,
    ),
    Table("by_uuid", (("id uuid", "md5($k::text)::uuid"), ("other uuid", "md5($n::text)::uuid"), ("n bigint", "$n"))),
    Table(
        "by_text",
        (
            (
                "id text",
                "(ARRAY['a', 'A', 'a ', 'á', U&'a\\0301', '', 'null', 'NULL', '''', '\"', '\\', '%', '😀'])"
                "[1 + $k % 13]",
            ),
            ("v text", _TEXT),
            ("large text", _LARGE),
        ),
        further=("ALTER TABLE by_text ALTER large SET STORAGE EXTERNAL",),
    ),
    Table("by_char", (("id char(8)", "'k' || $k"), ("v char(4)", "$n % 100"))),
    Table(
        "by_numeric",
        (
            (
                "id numeric",
                "(ARRAY['1', '1.0', '1.00', '0', '-0.5', '1e20', '123456789012345678901234567890.5'])"
                "[1 + $k % 7]::numeric",
            ),
            ("v numeric(38, 10)", "$n * 1.0000000001"),
            ("large text", _LARGE),
        ),
        further=("ALTER TABLE by_numeric ALTER large SET STORAGE EXTERNAL",),
    ),
    Table(
        "by_float",
        (
            (
                "id float8",
                "(ARRAY['0', '-0', 'NaN', 'Infinity', '-Infinity', '0.1', '1e300', '5e-324'])[1 + $k % 8]::float8",
            ),
            ("v float4", "$n / 3.0"),
            ("large text", _LARGE),
        ),
        further=("ALTER TABLE by_float ALTER large SET STORAGE EXTERNAL",),
    ),
    Table(
        "by_bytes",
        (
            ("id bytea", r"(ARRAY['\x', '\x00', '\x0000', '\xff', '\x61', '\x6100'])[1 + $k % 6]::bytea"),
            ("v bytea", "decode(md5($n::text), 'hex')"),
        ),
    ),
    Table(
        "by_time",
        (
            ("at timestamptz", "'2026-03-29 01:00Z'::timestamptz + $k * interval '1 us'"),
            ("no smallint", "$k % 2"),
            ("v timestamp", "timestamp '1900-01-01' + $n * interval '1 h'"),
        ),
        key=2,
    ),
    Table(
        "by_day",
        (
            ("day date", "date '2024-02-20' + $k"),
            ("lasts interval", "$n * interval '1 s 1 us'"),
            ("at time", "time '00:00' + $n % 86400 * interval '1 s'"),
        ),
    ),
    Table("by_flag", (("flag boolean", "$k % 2 = 0"), ("id quantity", "$k"), ("v text", _TEXT)), key=2),
    Table(
        "by_index",
        (("code varchar(12) NOT NULL", "'code ' || $k"), ("v text", _TEXT), ("large text", _LARGE)),
        constraint="",
        further=(
            "CREATE UNIQUE INDEX by_index_code ON by_index (code)",
            "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code",
            "ALTER TABLE by_index ALTER large SET STORAGE EXTERNAL",
        ),
    ),
    Table(
        "objects",
        (
            ("id int", "$k"),
            ("a jsonb", "jsonb_build_object($n, NULL, 'ä\"', $n * 0.10)"),
            ("b json", "('{\"b\":  ' || $n || ', \"b\": null}')::json"),
            ("large jsonb", f"jsonb_build_array({_LARGE})"),
        ),
        flips=True,
        further=("ALTER TABLE objects ALTER large SET STORAGE EXTERNAL",),
    ),
    Table(
        "numbers",
        (
            ("id bigint", "$k * 100000000000"),
            ("a float4", "(ARRAY['NaN', 'Infinity', '-0', '0.1'])[1 + $n % 4]::float4"),
            ("b float8", "(ARRAY['NaN', '-Infinity', '-0', '1e-320', '0.1'])[1 + $n % 5]::float8"),
            ("c numeric", "(ARRAY['NaN', '1.500', '1e30', '-0.00'])[1 + $n % 4]::numeric"),
            ("d numeric(50, 5)", "$n * 1e30"),
            ("e oid", "$n"),
            ("f money", "$n"),
        ),
    ),
    Table(
        '"Odd Näme ""x"" `y` 50"',
        (
            ('"select" int', "$k"),
            ('"a b" text', _TEXT),
            ('"a.b" text', "$n"),
            ('"x`y" int', "$n"),
            ('"quo""te" text', _LARGE),
            ('"it\'s" int', "$n"),
            ('"UPPER" text', _TEXT),
            ('"{b}" text', "'b' || $n"),
            ('"ü,;=()" text', "'u' || $n"),
            ('"_seq" text', "'seq' || $n"),
        ),
        flips=True,
    ),
    Table("parents", (("id int", "$k"), ("v text", _TEXT)), flips=True),
    Table(
        "children",
        (("id int", "$k"), ("v text", _TEXT), ("own text", "'own ' || $n")),
        behind=" INHERITS (parents)",
        flips=True,
    ),
    Table("wide", (("id int", "$k"), *((f"c{i} int", f"$n + {i}") for i in range(120))), flips=True),
    Table("keys", (("id int", "$k"),), flips=True),
    Table("pairs", (("a text", "'a' || $k % 5"), ("b text", "'b' || $k")), key=2),
    Table(
        "others",
        (
            ("id int", "$k"),
            ("a inet", "'10.0.0.0'::inet + $n % 65536"),
            ("b int4range", "int4range($n, $n + 5)"),
            ("c point", "point($n, 0.5)"),
            ("d bit varying", "$n::bit(8)::varbit"),
            ("e tsvector", "to_tsvector('simple', 'a b' || $n)"),
        ),
        flips=True,
    ),
    Table("empty", (("id int", "$k"), ("v text", _TEXT)), flips=True),
)
# fmt: on
OTHERS = (
    # Nobody alters it: who writes into it knows when the lake has all that was before.
    "CREATE TABLE marks (id int PRIMARY KEY)",
    # Of these the mirror knows nothing.
    "CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY)",
    "CREATE VIEW seen AS SELECT * FROM customers",
)
# With these a run takes a minute.
FEW = tuple(
    table
    for table in TABLES
    if table.name
    in ("customers", "addresses", "documents", "events", "log", "by_text", "by_float", "by_index", "pairs")
)
