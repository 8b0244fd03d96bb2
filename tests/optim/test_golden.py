"""Successive outer steps of the authors' code, run on torch and saved, reproduced by ours and by the numpy oracle."""

import jax
import numpy as np
import optax
import pytest

import noloco_jax as nj
from support import paths
from support.layouts import assert_trees_close, state_at_start
from support.oracle import diloco_step, noloco_step, replica_spread

GOLDEN = paths.GOLDEN / "outer"
NUM_ROUNDS = 3


class Golden:
    """One file of the authors' outer steps; a tree is the list of its tensors."""

    def __init__(self, name: str):
        with np.load(GOLDEN / name) as arrays:
            self.arrays = dict(arrays)
        self.alpha = float(self.arrays["outer_momentum"])
        self.beta = float(self.arrays["outer_lr"])

    def tree(self, name: str) -> list[np.ndarray]:
        return [self.arrays[f"{name}_t{j}"] for j in range(3)]

    def groups(self, k: int) -> list[list[int]]:
        return self.arrays[f"groups_{k}"].tolist()


def assert_reproduces(golden: Golden, tx: optax.GradientTransformationExtraArgs) -> None:
    """Compare all rounds: round 0 starts from the golden state, every later one from our own."""
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    params = golden.tree("phi_in_0")
    state = state_at_start(4, golden.tree("phi_in_0"), golden.tree("mom_in_0"))
    for k in range(NUM_ROUNDS):
        updates, state = jax.device_get(update(golden.tree(f"delta_{k}"), state, params))
        params = jax.tree.map(np.add, params, updates)
        assert_trees_close(params, golden.tree(f"theta_out_{k}"))
        assert_trees_close(state.rule.slow, golden.tree(f"phi_out_{k}"))
        assert_trees_close(state.rule.momentum, golden.tree(f"mom_out_{k}"))
        assert replica_spread(params) == pytest.approx(golden.arrays[f"weight_std_out_{k}"], abs=1e-6)


def test_noloco_takes_the_authors_outer_steps():
    golden = Golden("noloco_w4_g2.npz")
    pairing = nj.ExplicitPairing([golden.groups(k) for k in range(NUM_ROUNDS)])
    assert_reproduces(golden, nj.noloco(pairing, golden.beta, golden.alpha, sync_every=1))


def test_heavy_ball_diloco_takes_the_authors_outer_steps():
    golden = Golden("diloco_w4.npz")
    assert_reproduces(golden, nj.diloco(golden.beta, golden.alpha, nesterov=False, sync_every=1))


@pytest.mark.parametrize("k", range(NUM_ROUNDS))
def test_the_numpy_oracle_agrees_with_the_authors_code(k):
    for name in ("noloco_w4_g2.npz", "diloco_w4.npz"):
        golden = Golden(name)
        before = zip(*(golden.tree(f"{x}_in_{k}") for x in ("theta", "phi", "mom")), strict=True)
        after = zip(*(golden.tree(f"{x}_out_{k}") for x in ("phi", "mom")), strict=True)
        for inputs, outputs in zip(before, after, strict=True):
            if name.startswith("noloco"):
                settings = {"groups": golden.groups(k), "gamma": golden.beta}
                step = noloco_step(*inputs, alpha=golden.alpha, beta=golden.beta, **settings)
            else:
                step = diloco_step(*inputs, alpha=golden.alpha, beta=golden.beta, nesterov=False)
            assert_trees_close(step, outputs)
