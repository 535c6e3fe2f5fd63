"""PostgreSQL's values as Arrow arrays: each type's binary and text format, and the registry of types."""
