"""What `pg-cdc demo` runs, and the PostgreSQL server and the Spark that it, the benchmark and the tests start."""
