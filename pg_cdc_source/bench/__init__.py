"""What `pg-cdc bench` runs: the connector measured against its peers and against the limit, in one run."""
