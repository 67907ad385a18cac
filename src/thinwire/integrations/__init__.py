"""Strategies inside other people's trainers."""
