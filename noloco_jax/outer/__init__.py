"""Outer optimizers: the rule of an outer step, the pairing of replicas, and the Optax transform around both.

Nothing here knows a mesh, a configuration or how a message travels: that is the task of `exchange`.
"""
