"""Read tables at one point in time: what is scanned, its ranges, the keeper, and the readers in tasks."""
