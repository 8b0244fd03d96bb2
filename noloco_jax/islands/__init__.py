"""Islands: independent processes, one a replica, that train together over any network.

A call that works with a partner goes from top to bottom: `steps` (training) -> `network` (the training's side of the
network thread) -> `node` (the protocol of one island) -> `exchange` (one exchange) -> `transport` (gRPC). `exchange`,
`node`, `start`, `catch_up`, `pace` and `bounds` have no network and no arrays of their own, and take time from the
asyncio loop that runs them: tests run them on a virtual clock.
"""
