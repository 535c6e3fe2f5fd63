"""What a terminal is shown of texts that have names of somebody else's."""

from __future__ import annotations

from pg_cdc_source.cli.shown import shown


def test_what_moves_a_terminals_cursor_is_shown_as_it_is_written() -> None:
    assert shown("Müller 表 a.b") == "Müller 表 a.b"
    assert shown("x\nok  server\x1b[2K\x9b1A\x07") == "x\\x0aok  server\\x1b[2K\\x9b1A\\x07"
    assert shown("[ACCESS] t\n  Remedy: r", keeping="\n") == "[ACCESS] t\n  Remedy: r"
