"""Processes and machines: where a process stands, how processes start, agree and stop as one run."""
