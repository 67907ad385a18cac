"""What the top-k strategies have in common."""
