"""A virtual clock and its wire: many workers in one process, real training, virtual time."""
