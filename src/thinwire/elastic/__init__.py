"""Worlds whose workers may die, come back and join: who is in, agreed on without a coordinator."""
