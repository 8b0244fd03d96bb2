"""Single-program training over many devices: mesh, shardings, state, losses and the compiled programs."""
