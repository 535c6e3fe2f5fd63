"""The lake's formats, and the query that keeps tables in one of them equal to PostgreSQL's."""
