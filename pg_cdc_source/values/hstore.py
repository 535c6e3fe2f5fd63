"""Decode the extension hstore as maps of strings.

Its binary format is not read: ``hstore_send`` gives lengths in the database's encoding, and texts in the client's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.values.arrow import as_text, bitmap, byte_strings, content, utf8_strings
from pg_cdc_source.values.decoder import Decoded, Decoder, Field, MalformedError
from pg_cdc_source.values.escapes import find_escapes, remove_escapes
from pg_cdc_source.values.ndarrays import Flags, Ints
from pg_cdc_source.values.wire import WireBuffer

_MAP = pa.map_(pa.string(), pa.string())
_COUNT_BYTES = 4


def _maps(items: Field, pairs: Ints, valid: Flags | None) -> pa.Array:
    """Make maps of ``items``, in which keys and values alternate; ``pairs`` says how many pairs each map has."""
    keys, values = (
        Field(items.buffer, items.start[k::2], items.length[k::2], None if items.valid is None else items.valid[k::2])
        for k in (0, 1)
    )
    if keys.valid is not None and not keys.valid.all():
        raise MalformedError("expected a key, got NULL")
    octets = byte_strings(keys, keys.start, keys.length)
    _expect_distinct(octets, np.cumsum(pairs)[:-1])
    texts = as_text(octets)
    # Before Arrow 26, keys with a validity bitmap end the process, whatever is in it.
    texts = pa.Array.from_buffers(texts.type, len(texts), [None, *texts.buffers()[1:]], offset=texts.offset)
    columns = [texts, utf8_strings(values, values.start, values.length)]
    entries = pa.StructArray.from_arrays(columns, fields=[_MAP.key_field, _MAP.item_field])
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(pairs, dtype=np.int32)))
    return pa.Array.from_buffers(_MAP, len(pairs), [bitmap(valid), pa.py_buffer(offsets)], children=[entries])


def _expect_distinct(keys: pa.Array, first_of_row: Ints) -> None:
    """Check that no map has a key twice. hstore sorts keys by their bytes, so equal ones are neighbours."""
    same = np.zeros(len(keys), np.bool_)
    same[1:] = pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    same[first_of_row[first_of_row < len(keys)]] = False
    if same.any():
        raise MalformedError("expected each key once, got one twice")


def _no_maps(n: int, valid: Flags | None) -> pa.Array:
    offsets = pa.py_buffer(np.zeros(n + 1, np.int32))
    nothing = pa.array([], _MAP).keys
    entries = pa.StructArray.from_arrays([nothing, nothing], fields=[_MAP.key_field, _MAP.item_field])
    return pa.Array.from_buffers(_MAP, n, [bitmap(valid), offsets], children=[entries])


# What can follow an item in quotes: behind a key a value or NULL, behind a value the next key or nothing.
_ARROW, _COMMA, _NULL = b"=>", b", ", b"=>NULL"


@dataclass(frozen=True, slots=True)
class PrintedHstore(Decoder):
    r"""``hstore_out``: ``"a"=>"1", "b \"c\""=>NULL``; within quotes, a backslash precedes each quote and backslash.

    All maps are split at once, at the quotes that no backslash precedes: every other one opens an item. What lies
    between two items tells keys from values.
    """

    arrow = _MAP

    def read(self, values: Field) -> Decoded:
        n = len(values.start)
        some = np.flatnonzero(values.present(values.length > 0))
        if not len(some):
            return Decoded(_no_maps(n, values.valid))
        pairs = np.zeros(n, np.int64)
        items, pairs[some] = _split(Field(values.buffer, values.start[some], values.length[some]))
        return Decoded(_maps(items, pairs, values.valid))


def _split(maps: Field) -> tuple[Field, Ints]:
    """Return the keys and values of all ``maps``, and how many pairs each has. No map is empty."""
    octets, row_end = content(byte_strings(maps, maps.start, maps.length)), np.cumsum(maps.length)
    escapes, escaped = find_escapes(octets)
    is_quote = octets == ord('"')
    is_quote[escaped] = False
    quote = np.flatnonzero(is_quote)
    in_row = np.searchsorted(quote, row_end)
    if (in_row % 2).any() or (np.diff(in_row, prepend=0) == 0).any():
        raise MalformedError("expected quotes in pairs, got an unpaired one")
    first, after = quote[0::2], quote[1::2] + 1
    first_of_row = np.concatenate((np.zeros(1, np.int64), in_row[:-1] // 2))
    last = np.zeros(len(first), np.bool_)
    last[in_row // 2 - 1] = True
    row_start = np.concatenate((np.zeros(1, np.int64), row_end[:-1]))
    if (first[first_of_row] != row_start).any():
        raise MalformedError("expected a key in quotes first, got something else")
    until = np.concatenate((first[1:], row_end[-1:]))
    until[last] = row_end
    buffer, gap = WireBuffer([octets.tobytes()]), until - after
    key = ~last & _stands(buffer, after, gap, _ARROW)
    null_behind = last & _stands(buffer, after, gap, _NULL) | ~last & _stands(buffer, after, gap, _NULL + _COMMA)
    value = np.where(last, gap == 0, _stands(buffer, after, gap, _COMMA))
    if not (key | null_behind | value).all():
        raise MalformedError("expected => behind keys and a comma behind values, got something else")
    # A value comes only behind a key; a key comes first, behind a value, or behind a NULL.
    behind_key = np.concatenate((np.zeros(1, np.bool_), key[:-1]))
    if (value != behind_key).any():
        raise MalformedError("expected keys and values in turn, got something else")
    if len(escapes):
        octets, start, end = remove_escapes(octets, escapes, first + 1, after - 1)
        buffer = WireBuffer([octets.tobytes()])
    else:
        start, end = first + 1, after - 1
    # A key without a value is followed by an item without bytes.
    copies = 1 + null_behind
    valid = np.ones(int(copies.sum()), np.bool_)
    valid[np.cumsum(copies)[null_behind] - 1] = False
    start, length = np.repeat(start, copies), np.where(valid, np.repeat(end - start, copies), 0)
    pairs = np.diff(np.cumsum(copies)[in_row // 2 - 1], prepend=0) // 2
    return Field(buffer, start, length, None if valid.all() else valid), pairs


def _stands(buffer: WireBuffer, at: Ints, length: Ints, text: bytes) -> Flags:
    """Return where the ``length`` bytes at ``at`` are exactly ``text``."""
    found: Flags = length == len(text)
    where = np.flatnonzero(found)
    same: Any = buffer.at_any_byte(f"S{len(text)}")[at[where]] == text
    found[where] = same
    return found
