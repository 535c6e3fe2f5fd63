"""Follow a slot: the initial snapshot, the thread that reads ahead, batches, rewind, and the tables' history."""
