"""Paths of the project, configs, golden files, tools, and the data beside a checkout, which may be missing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared"

# What `python -m noloco_jax.NAME` runs.
TOOLS = (
    "train",
    "tokenize",
    "bench",
    "compare",
    "communication",
    "network",
    "simulate",
    "evaluate",
    "export",
    "generate",
    "island",
)
