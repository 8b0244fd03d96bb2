"""The state at the start of a run, without compiling a program for its mesh."""

from typing import Any

import jax

from noloco_jax.spmd.programs import Programs, TrainState, shardings_of


def initial_state(programs: Programs, params: Any = None) -> TrainState:
    """Return the state of `programs.init` with key 0, or of `programs.from_params`.

    Its operations run one by one on one device, each compiled once for all meshes, and the result is moved to the mesh.

    Args:
      programs: as `build_programs` makes them.
      params: parameters of one replica; None: random ones.
    """
    make: Any = programs.init if params is None else programs.from_params
    argument = jax.random.key(0) if params is None else params
    # The programs of `compile_programs` with an offloaded outer state are wrapped already.
    state = getattr(make, "__wrapped__", make)(argument)
    return jax.device_put(state, shardings_of(programs.between_steps))
