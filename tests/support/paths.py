"""Where things are: the project, its configs and golden files; and the data beside a checkout, which may be missing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared"
