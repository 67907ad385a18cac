"""A cluster with slow paths on one machine: hosts as network namespaces, shaped by tc."""
