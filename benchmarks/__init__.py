"""Measurements of thinwire and of rivals; see README.md."""
