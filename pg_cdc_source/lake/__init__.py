"""Tables in a lake that are kept as PostgreSQL has them, all at one LSN."""
