"""Options and results of measuring a variant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
FAILED, REFUSED = 1, 2  # exit statuses of a variant's process


@dataclass(frozen=True)
class Options:
    """Options of one measurement.

    Attributes:
      steps: inner steps to time.
      data_seconds: seconds to drain the data pipeline for; 0: not at all.
      compile_only: only compile; allocate and run nothing.
      profile: folder of a trace, or None.
    """

    steps: int
    data_seconds: float
    compile_only: bool
    profile: Path | None
