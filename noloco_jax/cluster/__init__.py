"""Processes and machines: the rank of a process, and the start, agreement and end of several as one run."""
