"""Text for a terminal."""

from __future__ import annotations


def shown(text: str, *, keeping: str = "") -> str:
    """Return text with ``\\x1b`` and the like for what is not printable, but for the characters to be kept.

    Names of tables and databases may have whatever somebody else likes: new lines, and what moves a terminal's cursor.
    """
    return "".join(c if c.isprintable() or c in keeping else f"\\x{ord(c):02x}" for c in text)
