"""Strategies by contributors: one file each, under the same contract tests; see README.md."""
