"""Sessions, and what is asked of the server: catalog, slots, snapshots, publications, replication."""
