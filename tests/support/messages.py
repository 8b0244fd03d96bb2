"""Runs whose messages are counted: every method, wire format and layout that changes how many bytes replicas send."""

from typing import Any

from noloco_jax.config import TrainConfig, from_dict

ROUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 1000, 5000)
STEPS = (1, 2, 3, 4097)
ONE_DEVICE = {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1}


def run(method: str, num_replicas: int = 4, **fields: Any) -> TrainConfig:
    """A run of a small Llama; fields by their dotted path, `__` for the dots, those of `outer` without a group."""
    stages = fields.get("mesh__stage", 1)
    values: dict[str, Any] = {
        "method": method,
        "num_replicas": num_replicas,
        "num_steps": 42,
        "num_microbatches": 2,
        "model": {
            "hidden_size": 72,
            "intermediate_size": 200,
            "num_layers": stages,
            "num_heads": 2,
            "num_kv_heads": 1,
        },
        "inner": {},
        "outer": {"sync_every": 4},
        "data": {"batch_size": 4, "sequence_length": 8},
        "mesh": {},
    }
    for path, value in fields.items():
        group, _, name = path.rpartition("__")
        values[group or "outer"][name] = value
    return from_dict(values)


def _cases() -> dict[str, tuple[TrainConfig, dict[str, int]]]:
    found: dict[str, tuple[TrainConfig, dict[str, int]]] = {}

    def add(method: str, num_replicas: int = 4, inside: dict[str, int] | None = None, **fields: Any) -> None:
        settings = {**fields, **(inside or {})}
        name = " ".join([method, str(num_replicas), *(f"{key}={value}" for key, value in settings.items())])
        found[name] = run(method, num_replicas, **fields), ONE_DEVICE | (inside or {})

    for wire in ("float32", "bfloat16", "int8", "int4", "modulo4"):
        for fragments in (1, 4):
            add("noloco", wire=wire, fragments=fragments)
    for wire in ("float32", "int4", "modulo4"):
        add("noloco", wire=wire, mesh__stage=2, mesh__routing="fixed")
        add("noloco", 2, {"fsdp": 2}, wire=wire, model__intermediate_size=32, model__hidden_size=16)
    for wire in ("float32", "int4"):
        for num_replicas, group_size in ((4, 3), (8, 3), (9, 5)):
            add("noloco", num_replicas, wire=wire, group_size=group_size)
        add("epidemic", 5, wire=wire, fragments=4)
    for num_replicas in (2, 3, 5, 8, 70):
        add("noloco", num_replicas)
        add("epidemic", num_replicas)
        add("diloco", num_replicas)
        add("sparseloco", num_replicas)
        add("ddp", num_replicas)
    add("noloco", 5, order="independent")
    add("epidemic", 7, neighbours=3, order="independent")
    add("diloco", mesh__stage=2)
    add("sparseloco", fragments=8, top_k=200)
    add("sparseloco", 3, {"fsdp": 2}, mesh__stage=2, mesh__routing="fixed")
    add("ddp", model__param_dtype="bfloat16", model__tie_embeddings=True)
    add("ddp", 3, {"tensor": 2}, mesh__stage=2, mesh__routing="fixed")
    add("ddp", 3, mesh__stage=2)
    add("local", mesh__stage=2)
    add("local")
    add("diloco", 5, final_merge=True)
    for num_replicas, stages in ((2, 2), (5, 2), (4, 3), (70, 2), (3, 4)):
        add("noloco", num_replicas, mesh__stage=stages)
    add("noloco", 3, mesh__stage=3, data__document_mask=True, model__dtype="bfloat16")
    add("noloco", 3, {"fsdp": 2}, mesh__stage=2, model__remat="stage")
    add("noloco", 4, mesh__stage=2, data__batch_size=2)
    return found


CASES = _cases()
