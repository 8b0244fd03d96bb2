"""The configuration of a run: fields, checks, and the command line."""
