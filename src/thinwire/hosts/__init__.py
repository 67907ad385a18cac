"""Hosts, the paths between them and what befalls them: values that the lab builds and the simulator plays."""
