"""``pg-cdc bench``: what the connector costs beside its peers and beside what is possible, measured in one run."""
