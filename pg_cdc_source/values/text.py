r"""Decode PostgreSQL's text format: many values at a time, from one buffer into one Arrow array.

Logical replication sends values as the output functions of their types print them (``*_out`` in PostgreSQL's source),
under the settings of every session here: ISO dates in UTC, shortest floats, hex bytea. Each decoder here stands beside
one of the binary format and gives identical arrays, refusals included.

Arrow's casts parse fast, but they also take what PostgreSQL never prints (``0x10``, ``007``, ``1e5`` as a decimal,
``inf``, 1e999 as infinity). So a text is cast only after it has matched the pattern of all that its output function
prints. Matching takes 50 to 80 ns a value and casting 10 to 40; Python code for each would take ten times as long.

- Text that PostgreSQL cannot have printed raises :class:`~pg_cdc_source.values.binary.MalformedError`, without it.
- What the Arrow type cannot hold is told from malformed text by more patterns, once some value is out of the ordinary.
- Patterns stand between ``^`` and ``$``, which are the ends of the text, not of its lines (RE2, not Python's ``re``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values import native
from pg_cdc_source.values.binary import (
    Decoded,
    Decoder,
    Field,
    Flags,
    Ints,
    MalformedError,
    Refused,
    WireBuffer,
    bitmap,
    byte_strings,
    fixed_array,
    from_numpy,
    from_texts,
    null,
    refusals,
    to_numpy,
    utf8_strings,
    without,
)

Octet = npt.NDArray[np.uint8]


def _texts(values: Field) -> pa.Array:
    return utf8_strings(values, values.start, values.length)


def _matches(text: pa.Array, pattern: str) -> pa.BooleanArray:
    return pc.match_substring_regex(text, f"^(?:{pattern})$")


def _any(*conditions: pa.BooleanArray) -> pa.BooleanArray:
    one, *others = conditions
    for other in others:
        one = pc.or_(one, other)
    return one


def _flags(condition: pa.BooleanArray) -> Flags:
    """Return where ``condition`` is true; NULL is not."""
    valid = condition.is_valid()
    return to_numpy(pc.if_else(valid, condition, valid))


def _expect(text: pa.Array, right: pa.BooleanArray, what: str) -> None:
    if right.false_count:
        first = text[pc.index(right, pa.scalar(False)).as_py()].as_py()
        raise MalformedError(f"expected the text of {what}, got {len(first)} characters that are none")


def _cast(text: pa.Array, arrow: pa.DataType, what: str) -> pa.Array:
    try:
        return text.cast(arrow)
    except pa.ArrowInvalid:
        raise MalformedError(f"expected the text of {what}, got one that is out of its range") from None


def _only(condition: pa.BooleanArray, text: pa.Array) -> pa.Array:
    return pc.if_else(condition, text, null(text.type))


@dataclass(frozen=True, slots=True)
class PrintedInteger(Decoder):
    """``int2out``, ``int4out``, ``int8out``, ``oidout``."""

    arrow: pa.DataType
    range: pa.DataType  # the integer of the type's own range: oid has no sign, and Spark no unsigned integers

    def read(self, values: Field) -> Decoded:
        memory = self.arrow.to_pandas_dtype()
        limits = np.iinfo(self.range.to_pandas_dtype())
        numbers = native.printed_integer(*values.located, int(limits.min), int(limits.max))
        if numbers is not None:
            return Decoded(fixed_array(self.arrow, numbers.astype(memory, copy=False), values.valid))
        text = _texts(values)
        _expect(text, _matches(text, "0|-?[1-9][0-9]*"), "an integer")
        return Decoded(_cast(text, self.range, "an integer").cast(self.arrow))


_FLOAT = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*[1-9])?(?:e[+-][0-9]{2,3})?|NaN|-?Infinity"
_ZEROS_AND_INFINITIES = ("0", "-0", "Infinity", "-Infinity")


@dataclass(frozen=True, slots=True)
class PrintedFloat(Decoder):
    """``float4out``, ``float8out``: under ``extra_float_digits = 1`` the shortest digits that give the value back."""

    arrow: pa.DataType

    def read(self, values: Field) -> Decoded:
        text = _texts(values)
        if not native.are_printed_floats(*values.located):
            _expect(text, _matches(text, _FLOAT), "a float")
        floats = _cast(text, self.arrow, "a float")
        # The cast makes infinity of what is too large, and zero of what is too small.
        zero = from_numpy(np.zeros(1, self.arrow.to_pandas_dtype()))[0]
        extreme = pc.or_(pc.is_inf(floats), pc.equal(floats, zero))
        if extreme.true_count:
            named = pc.is_in(text, value_set=from_texts(_ZEROS_AND_INFINITIES))
            _expect(text, pc.or_(pc.invert(extreme), named), f"a float of {self.arrow.bit_width} bits")
        return Decoded(floats)


@dataclass(frozen=True, slots=True)
class PrintedBoolean(Decoder):
    """``boolout``: ``t`` or ``f``; ``bit_out`` of one bit: ``1`` or ``0``."""

    true: str = "t"
    false: str = "f"
    arrow = pa.bool_()

    def read(self, values: Field) -> Decoded:
        letter = values.buffer.at_any_byte("u1")[values.first_byte()]
        true = letter == ord(self.true)
        if values.present((values.length != 1) | ~(true | (letter == ord(self.false)))).any():
            raise MalformedError(f"expected {self.true} or {self.false}, got other text")
        bits = pa.py_buffer(np.packbits(true, bitorder="little"))
        return Decoded(pa.Array.from_buffers(self.arrow, len(true), [bitmap(values.valid), bits]))


_DIGITS = bytes(range(256)).hex().encode("ascii")


def _bytes_of_hex(digits: bytes) -> npt.NDArray[np.uint16]:
    """Return the byte that two digits, read as one integer of 16 bits, stand for; 256 where they are none."""
    octets = np.full(2**16, 256, np.uint16)
    octets[np.frombuffer(digits, np.uint16)] = np.arange(256)
    return octets


_BYTE_OF_LOWER_CASE, _BYTE_OF_UPPER_CASE = _bytes_of_hex(_DIGITS), _bytes_of_hex(_DIGITS.upper())


@dataclass(frozen=True, slots=True)
class PrintedOctets(Decoder):
    r"""``byteaout`` under ``bytea_output = hex``: ``\x`` and two lower-case digits for every byte.

    PostGIS's ``LWGEOM_out`` and ``geography_out``: no prefix, and digits in upper case.
    """

    prefix: str = "\\x"
    upper_case: bool = False
    arrow = pa.binary()

    def read(self, values: Field) -> Decoded:
        skipped = len(self.prefix)
        wrong = (values.length < skipped) | ((values.length - skipped) % 2 == 1)
        octet, at = values.buffer.at_any_byte("u1"), values.first_byte()
        for k, letter in enumerate(self.prefix):
            wrong |= octet[at + k] != ord(letter)
        if values.present(wrong).any():
            raise MalformedError(f"expected {self.prefix or 'nothing'} and two digits for every byte, got other text")
        before = np.int64(skipped) if values.valid is None else skipped * values.valid.astype(np.int64)
        digits = byte_strings(values, values.start + before, values.length - before)
        table = _BYTE_OF_UPPER_CASE if self.upper_case else _BYTE_OF_LOWER_CASE
        octets = table[content(digits).view(np.uint16)]
        if len(octets) and octets.max() > 255:
            case = "upper" if self.upper_case else "lower"
            raise MalformedError(f"expected hexadecimal digits in {case} case, got other characters")
        offsets = np.frombuffer(digits.buffers()[1], np.int32)[: len(digits) + 1] // 2
        buffers = [bitmap(values.valid), pa.py_buffer(offsets), pa.py_buffer(octets.astype(np.uint8))]
        return Decoded(pa.Array.from_buffers(self.arrow, len(digits), buffers))


def content(strings: pa.Array) -> Octet:
    """Return the bytes of all strings of :func:`~pg_cdc_source.values.binary.byte_strings`, one behind the other."""
    _, offsets, content = strings.buffers()
    return np.frombuffer(content or b"", np.uint8)[: np.frombuffer(offsets, np.int32)[len(strings)]]


@dataclass(frozen=True, slots=True)
class PrintedUuid(Decoder):
    """``uuid_out``: the text itself."""

    arrow = pa.string()

    def read(self, values: Field) -> Decoded:
        text = _texts(values)
        _expect(text, _matches(text, "[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"), "a uuid")
        return Decoded(text)


_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG_YEAR = "[1-9][0-9]{4,6}"
_MONTH_AND_DAY = "-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME_OF_DAY = r" (?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{0,5}[1-9])?"


@dataclass(frozen=True, slots=True)
class PrintedMoment(Decoder):
    """``date_out``, ``timestamp_out``, ``timestamptz_out`` under ``DateStyle = ISO`` and ``TimeZone = UTC``.

    Years have four digits or more; those before year 1 are counted backwards and end with `` BC``.
    """

    arrow: pa.DataType

    def read(self, values: Field) -> Decoded:
        has_time = pa.types.is_timestamp(self.arrow)
        units = native.printed_moment(
            *values.located, has_time=has_time, has_zone=has_time and self.arrow.tz is not None
        )
        if units is not None:
            return Decoded(fixed_array(self.arrow, units if has_time else units.astype(np.int32), values.valid))
        text = _texts(values)
        rest = _MONTH_AND_DAY
        if has_time:
            rest += _TIME_OF_DAY + (r"\+00" if self.arrow.tz else "")
        what = "a date" if self.arrow == pa.date32() else "a timestamp"
        ordinary = _matches(text, _YEAR + rest)
        if not ordinary.false_count:
            return Decoded(_cast(text, self.arrow, what))
        infinite, outside = _matches(text, "-?infinity"), _matches(text, f"{_LONG_YEAR}{rest}|{_YEAR}{rest} BC")
        _expect(text, _any(ordinary, infinite, outside), what)
        moments = _cast(_only(ordinary, text), self.arrow, what)
        return Decoded(moments, refusals((_flags(infinite), "infinity"), (_flags(outside), "a year outside 1 to 9999")))


_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"


@dataclass(frozen=True, slots=True)
class PrintedDecimal(Decoder):
    """``numeric_out``, into a DECIMAL that holds the value exactly or not at all."""

    arrow: pa.Decimal128Type

    def read(self, values: Field) -> Decoded:
        words = native.decimal(*values.located, self.arrow.precision, self.arrow.scale, printed=True)
        if words is not None:
            return Decoded(fixed_array(self.arrow, words, values.valid))
        text = _texts(values)
        whole, scale = self.arrow.precision - self.arrow.scale, self.arrow.scale
        integer = f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        fits = _matches(text, rf"-?{integer}(?:\.[0-9]{{1,{scale}}})?" if scale else f"-?{integer}")
        if not fits.false_count:
            return Decoded(self._exactly(text))
        nan, infinite = _matches(text, "NaN"), _matches(text, "-?Infinity")
        number = _matches(text, _NUMBER)
        _expect(text, _any(number, nan, infinite), "a numeric")
        large = _matches(text, rf"-?[1-9][0-9]{{{whole}}}.*")
        fine = pc.and_not(_matches(text, rf"[^.]*\.[0-9]{{{scale}}}0*[1-9].*"), large)
        # Zeros behind the last digit that the type has do not change a value.
        zeros = rf"(\.[0-9]{{{scale}}})0+$" if scale else r"()\.0+$"
        trimmed = pc.replace_substring_regex(text, pattern=zeros, replacement=r"\1")
        return Decoded(
            self._exactly(_only(pc.and_not(number, pc.or_(large, fine)), trimmed)),
            refusals(
                (_flags(nan), "NaN"),
                (_flags(infinite), "infinity"),
                (_flags(large), f"more than {whole} digits before the decimal point"),
                (_flags(fine), f"more than {scale} digits after the decimal point"),
            ),
        )

    def _exactly(self, text: pa.Array) -> pa.Array:
        _expect(text, pc.invert(_matches(text, r"-[0.]+")), "a numeric")
        return _cast(text, self.arrow, "a numeric")


@dataclass(frozen=True, slots=True)
class PrintedDouble(Decoder):
    """``numeric_out``, as the nearest double.

    Not ``::float8``: PostgreSQL ends the whole COPY with an error where a numeric is too large for it.
    """

    arrow = pa.float64()

    def read(self, values: Field) -> Decoded:
        text = _texts(values)
        _expect(text, _matches(text, f"{_NUMBER}|NaN|-?Infinity"), "a numeric")
        try:
            doubles = text.cast(self.arrow)
        except pa.ArrowInvalid:
            # Arrow takes only so many digits.
            doubles = pa.array([None if item is None else float(item) for item in text.to_pylist()], self.arrow)
        infinite = pc.is_inf(doubles)
        if not infinite.true_count:
            return Decoded(doubles)
        too_large = pc.and_not(infinite, pc.ends_with(text, "Infinity")).fill_null(False)
        array = pc.if_else(too_large, null(self.arrow), doubles)
        return Decoded(array, refusals((_flags(too_large), "too large for a double")))


# What a byte may do besides being part of an element. White space is what array_isspace takes for it.
_ENDS, _MISPLACED, _QUOTES = 1, 2, 3


def _roles(delimiter: str) -> Octet:
    roles = np.zeros(256, np.uint8)
    roles[[ord(delimiter), ord("}")]] = _ENDS
    roles[list(b"{\\ \t\n\r\v\f")] = _MISPLACED
    roles[ord('"')] = _QUOTES
    return roles


_NULL = np.frombuffer(b"NULL", np.uint32)[0]
_LOWER_CASE = np.frombuffer(b"    ", np.uint32)[0]

_BOUNDS = r"\[-?[0-9]+:-?[0-9]+\]"
_SHIFTED = r"(?s)\[(?:-[0-9]+|0|[2-9][0-9]*|1[0-9]+):-?[0-9]+\]=\{[^{].*\}"
_OF_MORE_DIMENSIONS = rf"(?s)(?:(?:{_BOUNDS}){{2,6}}=)?\{{\{{.*\}}\}}"


@dataclass(frozen=True, slots=True)
class PrintedArray(Decoder):
    r"""``array_out``: ``{1,NULL,"a \"b\" \\ c"}``, with ``[2:3]=`` in front where it does not start at 1.

    An element is quoted where it is empty, reads NULL in any case, or has a brace, comma, quote, backslash or white
    space in it. Within quotes, a backslash stands before each quote and backslash. A few types have another delimiter
    than a comma (box: ``;``, PostGIS's: ``:``). All arrays are split at once: each byte behind the first brace belongs
    to an element or ends one, and the next begins there, be it in the next row::

        {1,NULL,3}{"a,b"}
         1,NULL,3} "a,b"}
          ↑    ↑ ↑      ↑   bytes outside quotes that end an element
    """

    element: Decoder
    delimiter: str = ","
    arrow: pa.DataType = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrow", pa.list_(pa.field("element", self.element.arrow, nullable=True)))

    def read(self, values: Field) -> Decoded:
        n = len(values.start)
        special, refused = _special(values)
        valid = without(values.valid, special) if refused else values.valid
        # Of the rest only {} has two bytes.
        some = values.present((values.length > 2) & ~special)
        count = np.zeros(n, np.int64)
        children = pa.nulls(0, self.element.arrow)
        if some.any():
            bodies = Field(values.buffer, values.start[some] + 1, values.length[some] - 1)
            elements, count[some] = _split(bodies, self.delimiter)
            decoded = self.element.read(elements)
            row_of = np.repeat(np.arange(n), count)
            refused += tuple(
                Refused(row_of[refusal.rows], f"an element: {refusal.reason}") for refusal in decoded.refused
            )
            children = decoded.array
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)))
        buffers = [bitmap(valid), pa.py_buffer(offsets)]
        return Decoded(pa.Array.from_buffers(self.arrow, n, buffers, children=[children]), refused)


def _special(values: Field) -> tuple[Flags, tuple[Refused, ...]]:
    """Return which rows are arrays that Spark does not have, and why; all others begin with one brace."""
    if values.present(values.length < 2).any():
        raise MalformedError("expected an array in braces, got a shorter text")
    octet, at = values.buffer.at_any_byte("u1"), values.first_byte()
    first, second = octet[at], octet[at + 1]
    special = values.present((first != ord("{")) | (second == ord("{")))
    if values.present(~special & (values.length == 2) & (second != ord("}"))).any():
        raise MalformedError("expected an array in braces, got two other characters")
    if not special.any():
        return special, ()
    rows = np.flatnonzero(special)
    text = _texts(Field(values.buffer, values.start[rows], values.length[rows]))
    many, shifted = _matches(text, _OF_MORE_DIMENSIONS), _matches(text, _SHIFTED)
    _expect(text, pc.or_(many, shifted), "an array")
    reasons = (
        (_flags(many), "an array of more than one dimension"),
        (_flags(shifted), "an array that does not start at 1"),
    )
    return special, tuple(Refused(rows[refusal.rows], refusal.reason) for refusal in refusals(*reasons))


def _split(bodies: Field, delimiter: str) -> tuple[Field, Ints]:
    """Return all elements of ``bodies``, which are arrays without their first brace, and how many each body has."""
    octets, row_end = content(byte_strings(bodies, bodies.start, bodies.length)), np.cumsum(bodies.length)
    if (octets[row_end - 1] != ord("}")).any():
        raise MalformedError("expected a brace at the end of an array, got another character")
    role, escape = _roles(delimiter).take(octets), escapes(octets)
    if len(escape):
        escaped = octets[escape + 1]
        if ((escaped != ord('"')) & (escaped != ord("\\"))).any():
            raise MalformedError("expected a backslash only before quotes and backslashes, got another")
        role[escape + 1] = 0
    at = np.flatnonzero(role)
    role = role[at]
    quote = role == _QUOTES
    # False from a closing quote on, true from an opening one.
    inside = np.bitwise_xor.accumulate(quote.view(np.uint8)).view(np.bool_)
    if (~inside & (role == _MISPLACED)).any():
        raise MalformedError("expected braces, backslashes and white space of elements in quotes, got others")
    ends = np.flatnonzero(~inside & (role == _ENDS))
    end = at[ends]
    last = np.flatnonzero(octets[end] == ord("}"))
    # A quote without its other one would hide the brace behind it.
    if not np.array_equal(end[last] + 1, row_end):
        raise MalformedError("expected one closing brace and quotes in pairs, got others")
    start = np.concatenate((np.zeros(1, np.int64), end[:-1] + 1))
    if (start == end).any():
        raise MalformedError("expected an element between delimiters, got none")
    # Quotes come in pairs, so that one pair for each element that begins with one leaves none elsewhere.
    quoted = octets[start] == ord('"')
    pairs = np.count_nonzero(quote) == 2 * np.count_nonzero(quoted)
    if not pairs or (at[ends[quoted] - 1] + 1 != end[quoted]).any():
        raise MalformedError("expected quotes around a whole element, got others")
    start, end = start + quoted, end - quoted
    if len(escape):
        kept = np.ones(len(octets), np.bool_)
        kept[escape] = False
        octets = octets[kept]
        start, end = start - np.searchsorted(escape, start), end - np.searchsorted(escape, end)
    buffer, length = WireBuffer([octets.tobytes()]), end - start
    valid = np.ones(len(start), np.bool_)
    four = np.flatnonzero(~quoted & (length == len("NULL")))
    word = buffer.at_any_byte("u4")[start[four]]
    null = four[(word | _LOWER_CASE) == (_NULL | _LOWER_CASE)]
    if len(null):
        if (buffer.at_any_byte("u4")[start[null]] != _NULL).any():
            raise MalformedError("expected NULL in capitals or in quotes, got other letters")
        valid[null], length[null] = False, 0
    return Field(buffer, start, length, valid if len(null) else None), np.diff(last, prepend=-1)


def escapes(octets: Octet) -> Ints:
    """Return where backslashes stand that escape the next byte: the first, third, … of each run of them."""
    at = np.flatnonzero(octets == ord("\\"))
    if not len(at):
        return at
    index = np.arange(len(at))
    first_of_run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) != 1, index, 0))
    escapes: Ints = at[(index - first_of_run) % 2 == 0]
    return escapes
