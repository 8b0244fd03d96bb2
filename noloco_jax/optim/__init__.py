"""Outer optimizers for Optax: rules, pairings, fragments, the outer step around them, and its exchange.

Nothing here knows a mesh or a run. `transforms` is the public side; `exchange` is the only part in which data goes from
one replica to another.
"""
