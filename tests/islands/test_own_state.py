"""State of an island in a user's own loop: trees of every kind, what begins anew, and checkpoints."""

import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.errors import UserError
from noloco_jax.islands.catch_up import CATCH_UP, CaughtUp
from noloco_jax.islands.checkpoints import OwnCheckpoints
from noloco_jax.islands.exchange import ProtocolError
from noloco_jax.islands.island import shown
from noloco_jax.islands.own_state import OwnState, fresh_values
from noloco_jax.islands.payload import pack
from noloco_jax.islands.tree_spec import summary


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": 0.1 * rng.normal(size=(64, 96)).astype(np.float32), "b": np.ones(96, np.float32)}


def sharded() -> tuple[Any, Any]:
    """Return weights sharded over four devices, and a `rest` with a leaf of every kind."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    places = {"w": NamedSharding(mesh, P(None, "data")), "b": NamedSharding(mesh, P())}
    params = {key: jax.device_put(x, places[key]) for key, x in weights().items()}
    rest = {
        "moment": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.zeros([], jnp.int32),
        "key": jax.random.key(3),
        "epoch": 2,
        "host": np.arange(3) + 2**40,
        "tokens": 3_000_000_007,
        "time": 1234567890.123,
        "seed": np.uint64(2**40 + 1),
    }
    return params, rest


def assert_same_form(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, jax.Array):
            assert (mine.dtype, mine.sharding, mine.committed) == (theirs.dtype, theirs.sharding, theirs.committed)


def assert_equal(found: Any, expected: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(mine, jax.Array) and jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def state_of(params: Any, rest: Any, **options: Any) -> OwnState:
    return OwnState(nj.noloco(sync_every=2, **options), params, rest, False)


def test_a_checkpoint_restores_values_shardings_random_keys_and_numbers(tmp_path):
    params, rest = sharded()
    own = state_of(params, rest)
    checkpoints = OwnCheckpoints(tmp_path, own.saved_specs, keep=1)
    for number in range(2):
        state = own.begun(own.params.arrays(params), own.rest.arrays({**rest, "epoch": number}))
        checkpoints.save(jax.tree.leaves(state), {"step": 6})
    checkpoints.close()
    checkpoints = OwnCheckpoints(tmp_path, own.saved_specs, keep=1)
    assert checkpoints.latest() == 1
    arrays, run = checkpoints.restore(1, jax.tree.leaves(own.places))
    checkpoints.close()
    state = own.placed(arrays)
    found = own.params.given(state.params), own.rest.given(state.inner)
    assert run["step"] == 6
    assert_equal(found, (params, {**rest, "epoch": 1}))
    assert_same_form(found, sharded())
    assert {x.sharding.spec for x in jax.tree.leaves(state.outer) if x.ndim == 2} == {P(None, "data")}


def test_a_checkpoint_that_is_damaged_or_holds_other_arrays_is_refused(tmp_path):
    def opened(params: Any) -> tuple[OwnCheckpoints, OwnState]:
        own = state_of(params, ())
        return OwnCheckpoints(tmp_path, own.saved_specs, keep=2), own

    checkpoints, own = opened(weights())
    checkpoints.save(jax.tree.leaves(own.begun(weights(), ())), {})
    checkpoints.close()
    other, _ = opened({**weights(), "b": np.zeros(95, np.float32)})
    with pytest.raises(UserError, match=r"other arrays \(params\['b'\]: float32\[96\] there, float32\[95\] here\)"):
        other.restore(0, jax.tree.leaves(own.places))
    other.close()
    data = max((tmp_path / "checkpoints/0").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    checkpoints, own = opened(weights())
    with pytest.raises(UserError, match=r"cannot be read .*move it aside"):
        checkpoints.restore(0, jax.tree.leaves(own.places))
    checkpoints.close()


@pytest.mark.parametrize(("fragments", "wire", "is_same"), [(2, "modulo4", True), (4, "modulo4", False)])
def test_windows_saved_for_other_fragments_are_refused(fragments, wire, is_same, tmp_path):
    own = state_of(weights(), (), fragments=2, wire="modulo4")
    checkpoints = OwnCheckpoints(tmp_path, own.saved_specs, keep=3)
    checkpoints.save(jax.tree.leaves(own.begun(weights(), ())), {})
    checkpoints.close()
    other = state_of(weights(), (), fragments=fragments, wire=wire)
    checkpoints = OwnCheckpoints(tmp_path, other.saved_specs, keep=3)
    with nullcontext() if is_same else pytest.raises(UserError, match="is of other arrays"):
        checkpoints.restore(0, jax.tree.leaves(other.places))
    checkpoints.close()


def test_leaves_that_are_named_begin_anew_and_others_come_from_the_peer():
    adam: Any = optax.adam(optax.constant_schedule(1e-3)).init({"w": np.ones(3, np.float32)})
    rest = {"step": np.int64(7), "adam": (adam[0]._replace(count=np.int32(5)), adam[1])}  # leaves: 0 to 3 are Adam's
    assert fresh_values(rest, False) == {} and fresh_values(rest, True).keys() == {0, 1, 2, 3, 4}
    found = fresh_values(rest, {"step": False, "adam": (True, False)})
    assert found.keys() == {0, 1, 2} and found[0] == 5 and not found[1].any() and not found[2].any()
    assert fresh_values((), None) == fresh_values((), True) == {}
    with pytest.raises(ValueError, match="does not begin like rest"):
        fresh_values(rest, (True, False))


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        (None, "fresh is missing, as rest has 2 arrays: .*True begins all of rest anew .*False takes all of it from"),
        (1, "fresh holds int in the place of True or False: .*a tree of both"),
        ({"mu": np.zeros(1), "nu": np.zeros(1)}, "fresh holds ndarray in the place of True or False"),
        ({"mu": True, "nu": np.True_}, "fresh holds bool.* in the place of True or False"),
    ],
)
def test_what_begins_anew_is_said_by_booleans_and_never_guessed(fresh, said):
    with pytest.raises(ValueError, match=said):
        OwnState(nj.noloco(), weights(), {"mu": np.zeros(1), "nu": np.zeros(1)}, fresh)


def test_islands_tell_apart_what_begins_anew():
    rest = (np.zeros(1), np.ones(2), 3)
    flags = (True, False, (True, False, False), (False, True, False))
    told = [OwnState(nj.noloco(), weights(), rest, fresh).described_fresh for fresh in flags]
    assert told[:2] == ["3 of 3 arrays of rest", "0 of 3 arrays of rest"] and len({*told}) == 4
    assert told[2].startswith("1 of 3 arrays of rest (")


def test_what_a_peer_sends_of_rest_is_believed_if_it_is_finite_and_nothing_of_what_begins_anew():
    """No bound applies to it, as README.md says."""

    def received(mu: float, fresh: bool) -> Any:
        rest = {"mu": np.zeros(300, np.float32), "step": np.int32(0)}
        own = OwnState(nj.noloco(), weights(), rest, {"mu": fresh, "step": False})
        theirs = {**rest, "mu": np.full(300, mu, np.float32), "step": np.int32(7)}
        leaves = dict(enumerate(map(np.asarray, jax.tree.leaves((weights(), theirs)))))
        codec = own.state_codec
        small = pack([leaves[number] for number in codec.small])
        given = codec.decode(CATCH_UP, codec.encode(CATCH_UP, leaves), small)
        return own.rest.given(own.from_peer(CaughtUp(3, 7, given)).inner)

    assert received(1e30, False)["mu"][0] == np.float32(1e30) and not received(1e30, True)["mu"].any()
    assert received(1e30, True)["step"] == 7
    with pytest.raises(ProtocolError, match="not finite"):
        received(np.inf, False)
    assert not received(np.inf, True)["mu"].any()


def test_a_tree_of_changed_structure_shape_or_dtype_is_refused_naming_the_leaf():
    own = state_of(weights(), (0, np.zeros(2)))
    with pytest.raises(ValueError, match="params changed its structure"):
        own.params.arrays({"w": weights()["w"]})
    with pytest.raises(ValueError, match=r"params\['w'\] was float32\[64, 96\]"):
        own.params.arrays({**weights(), "w": weights()["w"][1:]})
    with pytest.raises(ValueError, match=r"rest\[1\] was float64\[2\]"):
        own.rest.arrays((1, np.zeros(2, np.float32)))
    for number in (0.5, jnp.float32(1), 2**70):
        with pytest.raises(ValueError, match=r"rest\[0\] was of int at first and is .* now: begin with a number"):
            own.rest.arrays((number, np.zeros(2)))


@pytest.mark.parametrize(
    ("params", "rest", "line"),
    [
        ({"w": np.zeros(4)}, (), "params['w'] is float64, and JAX computes it in float32: convert it"),
        ({"w": np.zeros(4, np.float32), "b": 0.0}, (), "params['b'] is float64"),
        (weights(), {"none": np.zeros((0, 3))}, "rest['none'] has no elements"),
        (weights(), {"large": 2**100}, "rest['large'] holds Python objects, or an integer of more"),
        (weights(), {"x": "text"}, "rest['x'] is str: give JAX or NumPy arrays, numbers or random keys"),
    ],
)
def test_leaves_that_would_not_come_back_alike_are_refused_by_name(params, rest, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        state_of(params, rest)


def test_schedules_of_the_outer_step_are_compared_by_their_values():
    halves, tenths = (lambda round: 0.5 + 0 * round), (lambda round: 0.1 + 0 * round)
    assert shown(halves) == shown(lambda round: 0.5) != shown(tenths)
    assert shown(optax.linear_schedule(0.5, 0.1, 50)) != shown(optax.linear_schedule(0.5, 0.1, 500))
    assert shown(0.5) == "0.5"


def test_a_summary_of_weights_tells_seeds_apart_and_not_last_bits():
    one = weights(0)
    assert summary(one) == summary(jax.tree.map(lambda x: np.nextafter(x, 9), one)) == summary(weights(0))
    assert len({summary(weights(seed)) for seed in range(5)}) == 5
    assert summary({"w": np.zeros(3, np.float32)}) == "norm 0 and sum 0.00 x norm"
