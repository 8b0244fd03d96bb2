"""The outer optimizers: what a replica does in an outer step, who meets whom, and the Optax transform around both.

Nothing here knows a mesh, a configuration or how a message travels: that is `exchange`'s.
"""
