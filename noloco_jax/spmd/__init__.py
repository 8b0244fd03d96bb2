"""One program over many devices: mesh, shardings, state, the compiled programs and what they compute."""
