"""Seconds in which an island that lost its weights is back, over a narrow line to its donors.

PYTHONPATH=.:tests python -m support.catching_up --mbit=1,10,100

Real agents, calls and sockets of one process, without TLS; weights are random numbers in the arrays of a model, and
rounds go by the clock. The line of the island that comes back is a proxy of so many megabit/s each way and 20 ms; with
`--donor_mbit`, each donor's line to it is as narrow as that. Printed: bytes that came, seconds from its start to the
decision to train, and the rounds by which it is behind the others then.
"""

import argparse
import threading
import time
from collections.abc import Sequence

import numpy as np

from noloco_jax.islands.protocol.context import Settings
from support.fault_proxy import Link
from support.sites import Site, narrow, rosters, side_by_side

NAMES = ("berlin", "oslo", "paris", "rome")
LATENCY = 0.02


def weights(parameters: int, seed: int) -> list[np.ndarray]:
    """Make arrays of a small model's shapes: an embedding, and layers of 256 hidden states."""
    random, hidden = np.random.default_rng(seed), 256
    shapes = [(4096, hidden), (parameters // hidden - 4096, hidden)]
    return [random.normal(0, 0.02, shape).astype(np.float32) for shape in shapes]


def seconds_to_be_back(
    parameters: int, wire: str, whole: bool, mbit: float, donor_mbit: float | None, round_seconds: float
) -> tuple[float, float, int]:
    """Return megabytes received, seconds, and rounds behind."""
    settings = Settings(whole_state=whole)
    one = weights(parameters, 0)
    state = [*one, *(x.copy() for _ in range(4) for x in one)]  # φ, the outer momentum and two inner moments
    with rosters(NAMES, far="rome") as (seen, proxies):
        towards, _ = narrow(proxies, rate=mbit * 1e6 / 8, latency=LATENCY)
        if donor_mbit is not None:
            for proxy in proxies[1:]:
                proxy.links = {**proxy.links, "down": Link(donor_mbit * 1e6 / 8)}
        sites = [
            Site(name, seen[name], settings=settings, incarnation=1, wire=wire, state=state, num_weights=len(one))
            for name in NAMES
        ]
        side_by_side(*[site.open for site in sites])
        side_by_side(*[lambda site=site: site.train(3, 0.5) for site in sites])
        *donors, gone = sites
        gone.agent.close()
        back = Site(
            "rome", seen["rome"], settings=settings, incarnation=10, wire=wire, state=state, num_weights=len(one)
        )
        is_back = threading.Event()

        def train(site: Site) -> None:
            while not is_back.is_set():
                site.train(1, round_seconds)

        threads = [threading.Thread(target=train, args=(site,), daemon=True) for site in donors]
        for thread in threads:
            thread.start()
        carried, began = towards.carried, time.monotonic()
        back.agent.open()
        assert back.agent.admitted(60)
        back.agent.ready()
        assert back.agent.decided(3600)
        seconds = time.monotonic() - began
        back.look()
        behind = max(site.round for site in donors) - back.round
        received = sum(proxy.passed["down"] for proxy in proxies[1:]) if donor_mbit else towards.carried - carried
        is_back.set()
        for thread in threads:
            thread.join()
        side_by_side(*[site.agent.close for site in (*donors, back)])
    return received / 1e6, seconds, behind


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="1,10,100", help="of the island that comes back")
    parser.add_argument("--donor_mbit", type=float, help="of each donor's line")
    parser.add_argument("--parameters", type=int, default=4_300_800)
    parser.add_argument("--round_seconds", type=float, default=5.0)
    parser.add_argument("--forms", default="weights/modulo4,weights/float32,whole/float32")
    flags = parser.parse_args(arguments)
    for mbit in map(float, flags.mbit.split(",")):
        for form in flags.forms.split(","):
            kind, wire = form.split("/")
            sizes = flags.parameters, wire, kind == "whole", mbit, flags.donor_mbit, flags.round_seconds
            megabytes, seconds, behind = seconds_to_be_back(*sizes)
            print(f"{mbit:g} Mbit/s, {form}: {megabytes:.1f} MB, {seconds:.1f} s, {behind} rounds behind", flush=True)


if __name__ == "__main__":
    main()
