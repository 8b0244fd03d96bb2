"""Report of the communication in a run's compiled programs."""
