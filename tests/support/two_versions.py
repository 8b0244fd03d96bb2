"""Islands of two checkouts as one run, one of which is then upgraded: do they meet, and can they be merged?

    PYTHONPATH=.:tests python -m support.two_versions DIR --other=FOLDER [--steps=600] [--seconds=0.3]

Real processes over TLS train `configs/quickstart.py`: three islands run this checkout and three the one in FOLDER. At
round 30 one of the latter is stopped and resumes with this checkout. Prints how often each island's due rounds were
exchanged, within and between the checkouts, what islands were refused for, and the merged models' perplexity.
"""

import argparse
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from support.gathering import FOUNDERS, Gathering
from support.paths import ROOT

OTHERS = FOUNDERS[::2]
UPGRADED = OTHERS[0]


def protocol_of(checkout: Path) -> str:
    """Return a checkout's commit, and the version of its protocol."""
    code = "from noloco_jax.islands.protocol.messages import VERSION; print(VERSION)"
    python = [sys.executable, "-c", code]
    version = subprocess.run(python, cwd=checkout, env={"PYTHONPATH": str(checkout)}, capture_output=True, text=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return f"commit {commit.stdout.strip()}, protocol {version.stdout.strip()}"


def shares(lines: Iterable[dict], is_other: Callable[[str, int], bool], name: str) -> dict[str, tuple[int, int]]:
    """Return how many exchanges of an island met and were due, with partners of its checkout and of the other.

    Args:
      lines: of its metrics.
      is_other: name, round -> True for an island that ran the other checkout in that round.
      name: the island.
    """
    found: dict[str, tuple[int, int]] = {}
    for line in lines:
        if line["partner"] and line["outcome"] != "healed":
            is_between = is_other(line["partner"], line["round"]) != is_other(name, line["round"])
            met, due = found.get("between" if is_between else "same", (0, 0))
            found["between" if is_between else "same"] = met + (line["outcome"] in ("met", "late")), due + 1
    return found


def refusals(folder: Path) -> set[str]:
    """Return the lines of the islands' logs on refused islands."""
    texts = (path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
    return {line.strip() for text in texts for line in text.splitlines() if re.search("refuse", line)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--other", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=0.3)
    flags = parser.parse_args()
    print(f"this: {protocol_of(ROOT)}; other: {protocol_of(flags.other)}", flush=True)
    group = Gathering(flags.folder, flags.steps, flags.seconds)
    group.checkouts = {name: flags.other for name in OTHERS}
    upgraded_at = math.inf
    for name in FOUNDERS:
        group.train(name)
    try:
        group.wait_for_round(UPGRADED, 30)
        group.command("status", f"--roster={group.folder / 'roster.toml'}", f"--keys={group.keys}")
        group.running[UPGRADED].send_signal(signal.SIGTERM)
        group.running[UPGRADED].wait()
        upgraded_at = group.round(UPGRADED) + 1
        del group.checkouts[UPGRADED]
        group.train(UPGRADED)
    except AssertionError as error:
        print(error)
    statuses = group.end()

    def is_other(name: str, round: int) -> bool:
        return name in OTHERS and not (name == UPGRADED and round >= upgraded_at)

    print(f"\n{'island':8} {'checkout':8} {'same':>8} {'between':>8} starts status")
    for name in FOUNDERS:
        for is_old in (True, False):
            lines = [line for line in group.exchanges(name) if is_other(name, line["round"]) == is_old]
            if lines:
                met = {kind: f"{met}/{due}" for kind, (met, due) in shares(lines, is_other, name).items()}
                row = f"{name:8} {'other' if is_old else 'this':8} {met.get('same', '-'):>8}"
                print(f"{row} {met.get('between', '-'):>8} {group.starts[name]:6} {statuses[name]:6}")
    for line in sorted(refusals(group.folder)):
        print(line)
    if not any(statuses.values()):
        for names in (FOUNDERS, OTHERS, tuple(name for name in FOUNDERS if name not in OTHERS)):
            print(f"merged model of {', '.join(names)}: perplexity {group.perplexity(names):.3f}", flush=True)


if __name__ == "__main__":
    main()
