"""How the messages of an outer step cross one SPMD program: over mesh axes, over `vmap` axes, or over both.

The only rooms in which data goes from one replica to another are this one and `spmd.pipeline`, which uses `permute`.
"""
