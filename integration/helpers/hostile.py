"""A schema whose functions and operators fit better than PostgreSQL's own wherever these take what is only alike.

PostgreSQL takes a function whose types are exactly the given ones before one of its own that is polymorphic, or that
the types have to be changed for. Each of these raises an error, so that a single one which is called shows.
"""

from __future__ import annotations

from psycopg2.extensions import connection as Session

# For each function of up to three arguments, one whose arguments have other types of those that its own stand for.
_FUNCTIONS = """
DO $do$
DECLARE
    alike CONSTANT text[] := ARRAY['text', 'name', 'oid', 'int2', 'int4', 'int8', 'bool', 'xid', '"char"', 'regclass'];
    made record;
BEGIN
    FOR made IN
        SELECT p.proname, string_agg(
            CASE
                WHEN t.typname IN ('anyarray', 'anycompatiblearray') THEN kind.name || '[]'
                WHEN t.typtype = 'p' THEN kind.name
                WHEN t.typname = 'text' AND kind.name IN ('name', '"char"') THEN kind.name
                WHEN t.typname = 'oid' AND kind.name = 'regclass' THEN kind.name
                WHEN t.typname = 'int8' AND kind.name IN ('int4', 'int2', 'oid') THEN kind.name
                ELSE format_type(t.oid, NULL)
            END, ', ' ORDER BY a.i) AS arguments
        FROM pg_proc AS p
        CROSS JOIN unnest(alike) AS kind (name)
        CROSS JOIN unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a (type, i)
        JOIN pg_type AS t ON t.oid = a.type
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.pronargs <= 3
            AND p.proretset = (p.proname IN ('unnest', 'generate_series'))
            AND NOT EXISTS (
                SELECT FROM unnest(p.proargtypes::oid[]) AS b (type)
                JOIN pg_type AS u ON u.oid = b.type
                WHERE u.typtype = 'p' AND u.typname NOT LIKE 'any%'
            )
        GROUP BY p.oid, p.proname, kind.name
        HAVING bool_or(t.typtype = 'p' OR t.typname IN ('text', 'oid', 'int8'))
    LOOP
        BEGIN
            EXECUTE format(
                'CREATE FUNCTION hostile.%I(%s) RETURNS text LANGUAGE plpgsql AS '
                '$f$BEGIN RAISE EXCEPTION ''hostile function %s''; END$f$',
                made.proname, made.arguments, made.proname
            );
        EXCEPTION WHEN duplicate_function OR invalid_function_definition OR undefined_object THEN NULL;
        END;
    END LOOP;
END
$do$
"""

# For each of these operators, one of each two types that PostgreSQL has none for.
_OPERATORS = """
DO $do$
DECLARE
    alike CONSTANT text[] := ARRAY[
        'text', 'name', 'oid', 'int2', 'int4', 'int8', 'xid', 'char', 'regclass', 'jsonb', '_text', '_int4', '_oid'
    ];
    made record;
BEGIN
    FOR made IN
        SELECT o.name, format_type(l.oid, NULL) AS left, format_type(r.oid, NULL) AS right
        FROM unnest(ARRAY['=', '<>', '<', '>', '<=', '>=', '||', '~', '!~', '&&', '@>', '->', '->>']) AS o (name)
        JOIN pg_type AS l ON l.typname = ANY (alike)
        JOIN pg_type AS r ON r.typname = ANY (alike)
        WHERE NOT EXISTS (
            SELECT FROM pg_operator AS p
            WHERE p.oprname = o.name AND p.oprleft = l.oid AND p.oprright = r.oid
                AND p.oprnamespace = 'pg_catalog'::regnamespace
        )
    LOOP
        EXECUTE format(
            'CREATE OR REPLACE FUNCTION hostile.operator(%1$s, %2$s) RETURNS bool LANGUAGE plpgsql AS '
            '$f$BEGIN RAISE EXCEPTION ''hostile operator of %1$s and %2$s''; END$f$; '
            'CREATE OPERATOR hostile.%3$s (FUNCTION = hostile.operator, LEFTARG = %1$s, RIGHTARG = %2$s)',
            made.left, made.right, made.name
        );
    END LOOP;
END
$do$
"""


# Where the search_path has pg_catalog behind this schema, also those that PostgreSQL has itself.
_OWN_OPERATORS = """
DO $do$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['=', '<>', '<', '>', '<=', '>='] LOOP
        EXECUTE format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.two, LEFTARG = tid, RIGHTARG = tid)', name);
        EXECUTE format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.two, LEFTARG = int4, RIGHTARG = int4)', name);
    END LOOP;
END
$do$
"""
_TWO = (
    "CREATE FUNCTION hostile.two({0}, {0}) RETURNS bool LANGUAGE plpgsql AS"
    " $f$BEGIN RAISE EXCEPTION 'hostile operator of {0}'; END$f$"
)


def make_hostile(pg: Session) -> int:
    """Create the schema ``hostile``, which everybody may use; how many functions it has."""
    with pg.cursor() as cursor:
        cursor.execute("CREATE SCHEMA hostile; GRANT USAGE ON SCHEMA hostile TO PUBLIC")
        cursor.execute(_FUNCTIONS)
        cursor.execute(_OPERATORS)
        cursor.execute("; ".join(_TWO.format(kind) for kind in ("tid", "int4")))
        cursor.execute(_OWN_OPERATORS)
        cursor.execute("SELECT count(*) FROM pg_proc WHERE pronamespace = 'hostile'::regnamespace")
        return int(cursor.fetchone()[0])
