"""Islands: independent processes, one a replica, that train together over any network.

A round's message goes from top to bottom: `steps` (training) -> `network` (the training's side of the network thread)
-> `node` (one island among its peers, of which it has a `peer_table`) -> `meetings` (its rounds) -> `exchange` (one
exchange) -> `transport` (gRPC).
From `node` down to `exchange`, and in `start`, `catch_up`, `pace` and `bounds`, there is no network and there are no
arrays: tests run them on a virtual clock. `copies` gives weights to others; `own_state` and `island` are for users'
loops.
"""
