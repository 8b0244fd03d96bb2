"""Bytes that a run reports, against the messages of the programs that XLA compiles for it."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from noloco_jax.spmd.routing import draw_routes, route_pool
from noloco_jax.train.messages import messages_of, num_pairings
from support.traffic import MODEL, TINY

BITS = {"f32": 32, "s32": 32, "u32": 32, "u16": 16, "u8": 8}


def config_of(
    method: str,
    num_replicas: int,
    outer: dict[str, Any] | None = None,
    model: dict[str, Any] = TINY,
    **mesh: Any,
) -> TrainConfig:
    return from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_microbatches": 2,
            "model": model | {"num_layers": mesh.get("stage", 1)},
            "outer": outer or {},
            "data": {"batch_size": 4, "sequence_length": 8},
            "mesh": {"replica": num_replicas} | mesh,
        }
    )


def compiled(config: TrainConfig, program: str) -> str:
    programs = build_programs(config, make_mesh(config, jax.devices()))
    programs = compile_programs(config, programs, only=(program,), options={"xla_backend_optimization_level": 0})
    return programs.compiled[program].as_text() or ""


def permuted(hlo: str, devices_a_replica: int) -> dict[str, int]:
    """Map each computation to the bytes that its collective-permutes send between replicas, over all devices."""
    found, name = {}, ""
    for line in hlo.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = start[1]
        if message := re.search(r"= (.*?) collective-permute\(.*source_target_pairs=(\{\{.*?\}\})", line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", message[1])
            size = sum(BITS[dtype] // 8 * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes)
            pairs = np.array(re.findall(r"(\d+),(\d+)", message[2]), int) // devices_a_replica
            found[name] = found.get(name, 0) + size * int((pairs[:, 0] != pairs[:, 1]).sum())
    return found


@pytest.mark.parametrize(
    ("num_replicas", "outer", "mesh"),
    [
        (5, {}, {}),
        (5, {"group_size": 3, "wire": "int8"}, {}),
        (4, {"wire": "int4"}, {"stage": 2}),
        (3, {}, {"stage": 2}),
    ],
)
def test_reported_bytes_of_a_pass_over_the_pairings_equal_those_of_all_branches(num_replicas, outer, mesh):
    config = config_of("noloco", num_replicas, outer, **mesh)
    hlo = compiled(config, "outer_step")
    reported = messages_of(config, {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1})
    total = sum(reported.of_outer_step(round) for round in range(num_pairings(config))) * num_replicas
    assert sum(permuted(hlo, config.mesh.stage).values()) == pytest.approx(total, rel=1e-12)


def test_sharded_replicas_send_redundant_copies_of_their_norms_only():
    """Every device of a replica has whole norms and sends them to its counterpart."""
    config = config_of("noloco", 4, model=MODEL, fsdp=2)
    reported = messages_of(config, {"replica": 4, "stage": 1, "fsdp": 2, "tensor": 1})
    norms = 3 * MODEL["hidden_size"] * 4
    total = (reported.of_outer_step(0) + norms) * 4 * num_pairings(config)
    assert sum(permuted(compiled(config, "outer_step"), 2).values()) == total


def test_reported_bytes_of_a_routed_inner_step_equal_those_of_its_routes_branches():
    config = config_of("noloco", 4, stage=2)
    hlo = compiled(config, "inner_step")
    by_computation = permuted(hlo, 2)
    switches = [re.findall(r"%([\w.\-]+)", names) for names in re.findall(r"branch_computations=\{(.*?)\}", hlo)]
    switches = [names for names in switches if set(names) & by_computation.keys()]
    pool = route_pool(4, 2, config.seed, "random")
    distinct = list(dict.fromkeys(tuple(routes.flat) for routes in pool))  # a branch each
    branch_of = [distinct.index(tuple(routes.flat)) for routes in pool]
    assert [len(names) for names in switches] == [len(distinct)] * 2  # forward and back
    reported = messages_of(config, {"replica": 4, "stage": 2, "fsdp": 1, "tensor": 1})
    for step in range(1, 9):
        routes = np.asarray(draw_routes(len(pool), 3, config.seed, jnp.int32(step))).tolist()
        total = sum(by_computation.get(names[branch_of[route]], 0) for names in switches for route in routes)
        assert reported.of_inner_step(step) * 4 == total > 0


@pytest.mark.parametrize(("method", "program"), [("diloco", "outer_step"), ("ddp", "inner_step")])
def test_reported_bytes_of_an_all_reduce_are_those_of_a_ring(method, program):
    config = config_of(method, 4)
    reported = messages_of(config, {"replica": 4, "stage": 1, "fsdp": 1, "tensor": 1})
    sizes = []
    for line in compiled(config, program).splitlines():
        if reduced := re.search(r"= (.*?) all-reduce\(", line):
            shapes = re.findall(r"f32\[([\d,]*)\]", reduced[1])
            sizes += [4 * math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes]
    sent = reported.of_outer_step(0) if program == "outer_step" else reported.of_inner_step(1)
    assert sent == sum(sizes) * 2 * 3 / 4 > 0
