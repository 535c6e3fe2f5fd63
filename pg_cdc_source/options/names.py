"""Names as SQL writes them: parsed and quoted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.sql_keywords import KEYWORDS

# PostgreSQL cuts a longer identifier silently (NAMEDATALEN - 1), so that it could name another table. The bytes are
# those of the database's encoding.
MAX_NAME_BYTES = 63

# The lexer's rules (src/backend/parser/scan.l): every character outside ASCII counts as a letter, even a space.
_NAME_PART = re.compile(
    r"""\s*(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*)"""
    r"""|(?P<star>\*))\s*""",
    re.ASCII,
)
_CONNECTION = re.compile(r"://|\b(?:host|hostaddr|port|dbname|user|\w*pass\w*|pwd|\w*secret)\s*=", re.IGNORECASE)
_MINUS = re.compile(r"\s*-")
_NEEDS_NO_QUOTES = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
_ASCII_UPPER_TO_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_SUBQUERY = re.compile(r"\s*(?:\(|(?:select|with|table|values)\s)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """A relation's name in one to three parts: ``database.schema.table`` from the right."""

    parts: tuple[str, ...]

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        for_query: str = "pass it in the option query",
        for_several: str = "load each table on its own",
    ) -> QualifiedName:
        """Read a name as SQL does: unquoted parts fold to lower case, quoted parts keep everything.

        ``for_query`` is the remedy if the text is a query, ``for_several`` if it names several tables.
        """
        if _SUBQUERY.match(text):
            raise OptionError(f"{text!r} is a query, not a table's name", remedy=for_query)
        names = _parse_names(text)
        if len(names) != 1:
            raise OptionError(f"{text!r} names {len(names)} tables", remedy=for_several)
        if len(names[0]) > 3:
            raise OptionError(
                f"{text!r} has {len(names[0])} parts, a table has three at most: database.schema.table",
                remedy='quote a part that holds a dot: public."a.b"',
            )
        return cls(names[0])

    def __str__(self) -> str:
        """Return it as ``parse`` reads it, with quotes only where they are needed."""
        return dotted(*self.parts)


@dataclass(frozen=True, slots=True)
class TablePattern:
    """One table, or all tables of a schema if ``name`` is None. The search path finds the schema if that is None.

    If both are None, the pattern is ``*``: every table of every schema. ``but`` are those of them that are not meant.
    """

    schema: str | None
    name: str | None
    but: tuple[TablePattern, ...] = ()

    @property
    def qualified(self) -> QualifiedName | None:
        """The one table it names; None if it may match several."""
        if self.name is None:
            return None
        return QualifiedName((self.name,) if self.schema is None else (self.schema, self.name))

    def matches(self, schema: str, name: str) -> bool:
        is_within = self.schema in (None, schema) and self.name in (None, name)
        return is_within and not any(left_out.matches(schema, name) for left_out in self.but)

    def means(self, table: str) -> bool:
        """Whether it is this one table, named as by ``dotted``; without a schema, one of any schema."""
        return self.name is not None and (str(self) == table or (self.schema is None and table.endswith(f".{self}")))

    def __str__(self) -> str:
        """Return it as ``parse_tables`` reads it, with quotes only where they are needed, and without ``but``."""
        name = "*" if self.name is None else dotted(self.name)
        return name if self.schema is None else f"{dotted(self.schema)}.{name}"


MOST_LISTED = 10  # in an error; the others are counted


def listed(names: Iterable[str], separator: str = ", ") -> str:
    """Name at most ten, and say how many more there are."""
    texts = list(names)
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return separator.join(texts[:MOST_LISTED]) + more


def listed_names(names: Iterable[str]) -> str:
    """Name all of these columns, each as SQL text."""
    return ", ".join(map(quoted, names))


def quoted(identifier: str) -> str:
    """Return a single name, such as a column's, as SQL text that can be pasted; quote_ident() does the same."""
    return _in_quotes(identifier) if identifier in KEYWORDS else dotted(identifier)


def dotted(*parts: str) -> str:
    """Return a relation's name as ``QualifiedName.parse`` reads it.

    The column ``_table`` and checkpoints hold names in this form, so it must not change. Keywords have no quotes, which
    SQL allows after a dot.
    """
    return ".".join(part if _NEEDS_NO_QUOTES.fullmatch(part) else _in_quotes(part) for part in parts)


def _in_quotes(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _parse_names(text: str) -> list[tuple[str, ...]]:
    """Read a comma-separated list of dotted names."""
    return [tuple(part for part in name if part is not None) for _, name in _parse_patterns(text, stars=False)]


def _parse_patterns(text: str, *, stars: bool) -> list[tuple[bool, tuple[str | None, ...]]]:
    """Read a comma-separated list of dotted names, with None for a part that is a star.

    Where there may be ``stars``, a name may also begin with a minus; whether it does.
    """
    names: list[tuple[bool, tuple[str | None, ...]]] = []
    parts: list[str | None] = []
    has_minus = False
    position = 0
    while True:
        if stars and not parts and (minus := _MINUS.match(text, position)):
            has_minus, position = True, minus.end()
        match = _NAME_PART.match(text, position)
        if match is None or (match["star"] and not stars):
            raise _malformed_name(text, position)
        parts.append(None if match["star"] else _name(match))
        position = match.end()
        separator = text[position : position + 1]
        if separator != ".":
            names.append((has_minus, tuple(parts)))
            parts, has_minus = [], False
        if separator == "":
            return names
        if separator not in ".,":
            raise _malformed_name(text, position)
        position += 1


def _name(part: re.Match[str]) -> str:
    inner = part["quoted"]
    name = part["plain"].translate(_ASCII_UPPER_TO_LOWER) if inner is None else inner.replace('""', '"')
    check_characters(name)
    if not name:
        raise OptionError('a quoted name is empty ("")', remedy="write the name between the quotes")
    if len(name) > MAX_NAME_BYTES:
        raise OptionError(
            f"the name {name!r} has {len(name)} characters, PostgreSQL's names have {MAX_NAME_BYTES} bytes at most",
            remedy="write the name as the catalog holds it: PostgreSQL cut it when it was created",
        )
    return name


def check_characters(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(
            "it has a character that PostgreSQL's text cannot hold (NUL, or half of a surrogate pair)",
            remedy="remove it",
        )


def _malformed_name(text: str, position: int) -> OptionError:
    rest = text[position:].lstrip()
    if not text.strip():
        what = "it is empty"
    elif _CONNECTION.search(text):
        # It may have a password.
        return OptionError(
            "it is a URL or a connection string, and not a name",
            remedy="pass that in the option url",
        )
    elif not rest:
        what = f"{text!r} ends where a name is expected"
    elif rest.startswith('"'):
        what = f"{text!r} has a quote that is not closed"
    else:
        what = f"{text!r} is not a name in SQL: it has {rest[0]!r} at character {len(text) - len(rest) + 1}"
    return OptionError(what, remedy='quote names as in SQL: schema."Table name", with "" for a quote inside')


def parse_columns(text: str) -> tuple[str, ...]:
    if text.strip() == "*":
        raise OptionError("'*' is not a column", remedy="leave the option out to mean every column")
    names = _parse_names(text)
    for name in names:
        if len(name) > 1:
            raise OptionError(
                f"{dotted(*name)} is a qualified name, a plain column is needed",
                remedy='write only the column; quote a column whose name holds a dot: "a.b"',
            )
    columns = tuple(name for (name,) in names)
    for column in columns:
        if columns.count(column) > 1:
            raise OptionError(f"the column {quoted(column)} is named twice", remedy="name it once")
    return columns


def parse_columns_of_tables(text: str) -> dict[str, tuple[str, ...]]:
    """Read a comma-separated list of columns as ``schema.table.column``; the columns by table."""
    found: dict[str, tuple[str, ...]] = {}
    for name in _parse_names(text):
        if len(name) != 3:
            raise OptionError(
                f"{dotted(*name)} is not a column's name with its table and schema",
                remedy=f"write schema.table.column, as in public.orders.{quoted(name[-1])}",
            )
        table = dotted(*name[:2])
        found[table] = (*found.get(table, ()), name[2])
    return found


def parse_tables(text: str) -> tuple[TablePattern, ...]:
    """Read a comma-separated list of tables, ``schema.table`` or ``schema.*``; a star in quotes is an ordinary name.

    One with a minus before it is left out of those with a star.
    """
    if _SUBQUERY.match(text):
        raise OptionError(f"{text!r} is a query, not a list of tables", remedy="name the tables that it reads")
    patterns: list[TablePattern] = []
    left_out: list[TablePattern] = []
    for has_minus, parts in _parse_patterns(text, stars=True):
        shown = ".".join("*" if part is None else dotted(part) for part in parts)
        if None in parts[:-1]:
            raise OptionError(
                f"{shown} has * before its last part", remedy="name the schema: schema.*; or use * alone for all"
            )
        if len(parts) > 2:
            raise OptionError(
                f"{shown} has {len(parts)} parts, a table here has two at most: schema.table",
                remedy='set the database in the connection options; quote a part that holds a dot: public."a.b"',
            )
        pattern = TablePattern(parts[-2] if len(parts) == 2 else None, parts[-1])
        if pattern in (patterns if has_minus else left_out):
            raise OptionError(f"{pattern} is both named and left out", remedy="leave out one of them")
        if pattern in (*patterns, *left_out):
            raise OptionError(f"the table {pattern} is named twice", remedy="name it once")
        (left_out if has_minus else patterns).append(pattern)
    for pattern in left_out:
        within = [all_of for all_of in patterns if all_of.name is None and all_of.schema in (None, pattern.schema)]
        if not within or pattern.schema is None:
            raise OptionError(
                f"-{pattern} leaves out what no pattern has",
                remedy="write it with its schema beside a pattern with a star: public.*, -public.audit",
            )
    return tuple(replace(one, but=tuple(left_out)) if one.name is None else one for one in patterns)
