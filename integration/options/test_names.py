"""Names are quoted as the server quotes them."""

from __future__ import annotations

from psycopg2.extensions import connection as Session

from pg_cdc_source.options.names import quoted
from pg_cdc_source.options.sql_keywords import KEYWORDS


def test_every_keyword_is_quoted_as_the_server_quotes_it(pg: Session) -> None:
    with pg.cursor() as cursor:
        cursor.execute("SELECT word, quote_ident(word) FROM pg_get_keywords()")
        by_server = dict(cursor.fetchall())
    assert len(by_server) > 400
    # A word that only another version reserves is quoted, too; the server reads it all the same.
    ours = {word: quoted(word) for word in by_server}
    assert {word: text for word, text in ours.items() if text != by_server[word] and word not in KEYWORDS} == {}
    if pg.server_version >= 180000:
        assert ours == by_server
        assert by_server.keys() >= KEYWORDS


def test_other_names_are_quoted_as_the_server_quotes_them(pg: Session) -> None:
    names = ["a", "A", "1a", "_", "a b", 'a"b', "ä", "a$", "", "user", "public"]
    with pg.cursor() as cursor:
        cursor.execute(
            "SELECT array_agg(quote_ident(name) ORDER BY i) FROM unnest(%s) WITH ORDINALITY AS n (name, i)", (names,)
        )
        ((by_server,),) = cursor.fetchall()
    assert list(map(quoted, names)) == by_server
