"""Exchange of outer-step messages inside one SPMD program: over mesh axes, over `vmap` axes, or over both.

Data goes from one replica to another only here and in `spmd.pipeline`, which uses `permute`.
"""
