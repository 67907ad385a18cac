"""Payload over mutual TLS: connections of our own, below the lanes of `wire/process_group.py`."""
