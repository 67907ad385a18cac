"""Numbers in, payload out: how they look on the wire. Nothing here communicates."""
