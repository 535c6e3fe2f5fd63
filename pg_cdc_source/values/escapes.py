"""Find and remove the backslashes in quoted items, which arrays and hstore print the same way."""

from __future__ import annotations

import numpy as np

from pg_cdc_source.values.decoder import MalformedError
from pg_cdc_source.values.ndarrays import Bytes, Ints


def find_escapes(octets: Bytes) -> tuple[Ints, Ints]:
    """Return the positions of backslashes that escape the next byte, and of the bytes that they escape.

    Of a run of backslashes, the first, third, … escape. Raises MalformedError where one escapes anything but a quote or
    a backslash.
    """
    at = np.flatnonzero(octets == ord("\\"))
    if not len(at):
        return at, at
    index = np.arange(len(at))
    first_of_run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) != 1, index, 0))
    escapes = at[(index - first_of_run) % 2 == 0]
    escaped = np.minimum(escapes + 1, len(octets) - 1)
    if ((octets[escaped] != ord('"')) & (octets[escaped] != ord("\\"))).any():
        raise MalformedError("expected backslashes only before quotes and backslashes, got one elsewhere")
    return escapes, escaped


def remove_escapes(octets: Bytes, escapes: Ints, start: Ints, end: Ints) -> tuple[Bytes, Ints, Ints]:
    """Return ``octets`` without the bytes at ``escapes``, and where items from ``start`` to ``end`` lie then."""
    if not len(escapes):
        return octets, start, end
    kept = np.ones(len(octets), np.bool_)
    kept[escapes] = False
    return octets[kept], start - np.searchsorted(escapes, start), end - np.searchsorted(escapes, end)
