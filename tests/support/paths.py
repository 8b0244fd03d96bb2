"""Where things are: the project, its configs, and the folder of real data beside a checkout, which may be missing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
SHARED = ROOT.parent / "shared"
