"""Islands whose training is a clock and whose weights are an array: real agents, calls and networks, quick to run."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from noloco_jax.exchange.wire import Float32
from noloco_jax.islands.agent import Agent, Correction, Healed, Met
from noloco_jax.islands.entries import dials_of
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.payload import PlainCodec, norm_of
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.roster import Island as Listed
from noloco_jax.islands.snapshots import Snapshots
from noloco_jax.islands.state_shares import layouts_of
from support.fault_proxy import FaultProxy, Link
from support.island_nodes import IDENTITY, circle
from support.ports import free_ports

TOKENS = 100


def partner_of(names: tuple[str, ...], name: str) -> Callable[[int], str | None]:
    """The other one of two; of four, each in its turn."""
    me = names.index(name)
    if len(names) == 2:
        return lambda round: names[1 - me]
    assert len(names) == 4
    return lambda round: names[me ^ (1 + round % 3)]


def partner_among(members: Members, name: str) -> Callable[[int], str | None]:
    """Follow the active members of each round, by the circle method."""

    def of(round: int) -> str | None:
        active = members.active(round)
        return circle(active, name)(round) if name in active and len(active) > 1 else None

    return of


class Site:
    """An island that trains by the clock.

    Attributes:
      met: what became of its messages.
      corrections: of each round, that came.
      seconds: that its training spent in its agent's hands, in each round.
      lines: that it had for people.
      heals: states that it took.
    """

    def __init__(
        self,
        name: str,
        roster: Roster,
        *,
        size: int = 1000,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
        incarnation: int = 1,
        journal: Journal | None = None,
        identity=IDENTITY,
        began_before: bool = False,
        members: Members | None = None,
        members_file: Path | None = None,
        wire: str = "float32",
        state: Sequence[np.ndarray] = (),
        num_weights: int = 1,
        listen: Address | None = None,
    ):
        settings = settings or Settings()
        self.name = name
        self._size = size
        self.round = journal.round if journal else -1
        self.met: list[Met] = []
        self.corrections: dict[int, np.ndarray] = {}
        self.seconds: list[float] = []
        self.lines: list[str] = []
        self.heals: list[Healed] = []
        others = [other for other in roster.names if other != name]
        partner = partner_of(roster.names, name) if members is None else partner_among(members, name)
        message = self.message(0)
        self._state = state
        states = layouts_of(state or [message], num_weights, wire)
        settings = dataclasses.replace(settings, shares=states.of(settings.whole_state).count)
        dials = dials_of(roster, members or Members(roster.names))
        rules = settings, journal, began_before, members, dials
        protocol = Island(name, others, identity, partner, incarnation, *rules)
        arguments = settings, PlainCodec(Float32(), [message], [message]), states, self.lines.append
        self.agent = Agent(roster, name, credentials, protocol, *arguments, Snapshots({}), {}, members_file, listen)

    def message(self, round: int) -> np.ndarray:
        """Return the message of a round, different from every other's."""
        seed = sum(map(ord, self.name))
        noise = np.random.default_rng([seed, round]).standard_normal(self._size)
        return (200.0 + noise).astype(np.float32)  # replicas of one model differ by little

    def open(self) -> None:
        """Joins the others."""
        self.agent.open()
        assert self.agent.admitted(60), f"{self.name} hears nobody"
        self.agent.ready()
        assert self.agent.decided(60), f"{self.name} waits"

    def train(self, rounds: int, seconds: float) -> None:
        """Ends so many rounds, one after so many seconds, and looks four times a round for what has come."""
        for _ in range(rounds):
            spent = 0.0
            for _ in range(4):
                time.sleep(seconds / 4)
                spent -= time.monotonic()
                self.look()
                spent += time.monotonic()
            self.round += 1
            message = self.message(self.round)
            spent -= time.monotonic()
            self.agent.end_round(self.round, TOKENS, [message], norm_of([message]))
            spent += time.monotonic()
            self.seconds.append(spent)

    def close(self) -> None:
        """After what will still come of its messages, which it enters."""
        self.agent.settle(self.round, 5.0)
        self.agent.leave()
        self.agent.settle(self.round, 5.0)  # what was in doubt
        items, _ = self.agent.take_all()
        self._keep(items)
        self.agent.close()

    def look(self) -> None:
        """Enters what has come, and gives its state to who waits for it."""
        self._keep(self.agent.take())
        if self.agent.wants_state and self.round >= 0:
            state = self._state or [self.message(self.round)]
            self.agent.give(self.round, self.round, {number: state[number] for number in self.agent.wanted})

    def _keep(self, items: list[Correction | Healed]) -> None:
        for item in items:
            if isinstance(item, Correction):
                assert item.round not in self.corrections
                self.corrections[item.round] = item.arrays.result()[0]
            else:
                self.heals.append(item)
                self.round = item.round
        self.met += self.agent.take_met()

    def share(self, first: int = 0, *, without: str = "") -> float:
        """Return the share of its rounds from `first` on that were exchanged, except those with one other island."""
        rounds = {one.round: one for one in self.met if one.round >= first and one.partner != without}
        return sum(one.outcome != "alone" for one in rounds.values()) / len(rounds)


def side_by_side(*works: Callable[[], None]) -> None:
    """Runs them in threads; raises what one of them raises."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def rosters(names: tuple[str, ...], far: str) -> Iterator[tuple[Mapping[str, Roster], list[FaultProxy]]]:
    """A roster for each island, in which `far` and the others reach each other by proxies alone."""
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with contextlib.ExitStack() as stack:
        into = stack.enter_context(FaultProxy(ports[far]))
        out_of = {name: stack.enter_context(FaultProxy(ports[name])) for name in names if name != far}

        def port(name: str, seen_from: str) -> int:
            if name != seen_from and name == far:
                return into.port
            return out_of[name].port if seen_from == far != name else ports[name]

        yield (
            {
                me: Roster("test", tuple(Listed(name, Address("127.0.0.1", port(name, me))) for name in names))
                for me in names
            },
            [into, *out_of.values()],
        )


def narrow(proxies: list[FaultProxy], rate: float, latency: float) -> tuple[Link, Link]:
    """Makes the proxies of a far island one line of so many bytes a second: (towards it, away from it)."""
    towards, away = Link(rate), Link(rate)
    into, *out_of = proxies
    into.links = {"up": towards, "down": away}
    for proxy in out_of:
        proxy.links = {"up": away, "down": towards}
    for proxy in proxies:
        proxy.latency = latency
    return towards, away
