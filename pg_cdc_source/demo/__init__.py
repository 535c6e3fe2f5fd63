"""What `pg-cdc demo` shows, and the server and Spark that it and the tests start."""
