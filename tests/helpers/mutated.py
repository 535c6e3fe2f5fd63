"""Messages that are nearly what PostgreSQL sends."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def mutated(draw: st.DrawFn, known: Sequence[bytes], keep: int) -> bytes:
    """A message with some of its bytes, but for the first ``keep``, replaced, removed, or others put in."""
    data = bytearray(draw(st.sampled_from(known)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(keep, len(data)))
        new = draw(st.binary(max_size=4) | st.sampled_from([b"\0", b"\xff", b"\x7f\xff\xff\xff", b"t", b"u", b"n"]))
        data[at : at + draw(st.integers(0, 5))] = new
    return bytes(data)
