"""How the messages of an outer step cross one SPMD program."""
