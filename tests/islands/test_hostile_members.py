"""Protocol violations and false reports by a member, over Flight: each is refused or bounded, and its sender named."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from noloco_jax.islands.channel import Channel
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import _seal
from noloco_jax.islands.payload import specs_of
from noloco_jax.islands.peer_errors import PeerError
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.messages import (
    Caller,
    ExchangeId,
    Hello,
    Message,
    Received,
    Speed,
    StatusRequest,
    Timing,
    to_json,
)
from noloco_jax.islands.protocol.speeds import MOST_TOLD
from support.counted import in_time
from support.island_world import IDENTITY
from support.rosters import on_loopback
from support.sites import TOKENS, Site

SECONDS = 30.0  # timeout of calls, which end long before it
GOOD = np.full(1000, 0.5, np.float32)
NAN = np.full(1000, np.nan, np.float32)


class Victim:
    """Island paris after round 0, and hand-made calls of member berlin."""

    def __init__(self, settings: Settings | None = None):
        self.roster = on_loopback("berlin", "paris")
        self.site = Site("paris", self.roster, settings=settings)
        self.attempts = 0
        self.site.open()  # berlin does not listen
        self.site.train(1, 0.1)

    @contextlib.contextmanager
    def exchange(self, round: int = 0, timing: Timing | None = None) -> Iterator[tuple[Channel, ExchangeId]]:
        """Open an exchange as berlin, up to paris's own message; yield the channel and the exchange's id."""
        self.attempts += 1
        xid = ExchangeId(round, "berlin", 1, self.attempts)
        hello = Hello(Caller(IDENTITY, "berlin", "paris", 1, round), xid, TOKENS, timing)
        kinds = {"Message": specs_of([GOOD])}
        client = Client(self.roster, "berlin", None, "paris")
        call = client.exchange(to_json(hello), lambda header: kinds.get(header["kind"]), SECONDS)
        with contextlib.suppress(PeerError), call as channel:
            assert [channel.receive().header["kind"] for _ in range(2)] == ["Accept", "Message"]
            yield channel, xid

    def pop_corrections(self) -> list[np.ndarray]:
        """Wait 0.3 s; remove and return the corrections received so far."""
        time.sleep(0.3)
        self.site.look()
        found, self.site.corrections = list(self.site.corrections.values()), {}
        return found


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.site.agent.close()


def read_to_end(channel: Channel) -> None:
    """Read to the end of the call; raise the `PeerError` that it ends with."""
    while True:
        channel.receive()


def test_a_second_message_in_one_exchange_is_refused_and_never_applied(victim):
    with victim.exchange() as (channel, xid):
        for message in (GOOD, NAN):
            channel.send(to_json(Message(xid)), [message])
        channel.send(to_json(Received(xid, True)))
        read_to_end(channel)
    assert all(np.isfinite(correction).all() for correction in victim.pop_corrections())
    assert in_time(lambda: any("berlin" in line and "a second one" in line for line in victim.site.lines), 20)


def test_messages_of_calls_that_break_before_they_are_received_do_not_pile_up(victim):
    for attempt in range(6):
        with victim.exchange() as (channel, xid):
            channel.send(to_json(Message(xid)), [GOOD])
            assert in_time(lambda xid=xid: xid in victim.site.agent._others, 20), attempt
            channel.cancel()
        time.sleep(0.1)
    assert len(victim.site.agent._others) == 1


@pytest.mark.parametrize("call", ["an exchange", "a status request"])
def test_a_message_of_another_exchange_is_refused_before_it_is_read(victim, call):
    with contextlib.suppress(PeerError):
        if call == "an exchange":
            with victim.exchange() as (channel, xid):
                channel.send(to_json(Message(xid._replace(attempt=99))), [NAN])
                read_to_end(channel)
        else:
            request = to_json(StatusRequest(IDENTITY, until_ready=True))
            client = Client(victim.roster, "berlin", None, "paris")
            with client.exchange(request, lambda header: None, SECONDS) as channel:
                channel.send(to_json(Message(ExchangeId(0, "berlin", 1, 1))), [NAN])
                read_to_end(channel)
    assert victim.pop_corrections() == []
    said = "of another exchange" if call == "an exchange" else "does not belong to this call"
    assert in_time(lambda: any("berlin" in line and said in line for line in victim.site.lines), 20), victim.site.lines


def test_three_damaged_messages_in_a_row_lead_to_quarantine(victim, monkeypatch):
    """A wrong digest counts like a message with non-finite values."""
    for attempt in range(3):
        with monkeypatch.context() as patch, victim.exchange() as (channel, xid):
            patch.setattr("noloco_jax.islands.frames._seal", with_wrong_digest)
            channel.send(to_json(Message(xid)), [GOOD])
            patch.undo()
            read_to_end(channel)
        assert in_time(lambda attempt=attempt: sum("digest" in line for line in victim.site.lines) > attempt, 20)
    assert in_time(lambda: any("3 broken messages in a row" in line for line in victim.site.lines), 20), (
        victim.site.lines
    )


def with_wrong_digest(content):
    return _seal({**content, "digest": "0" * 32} if "digest" in content else content)


@pytest.mark.parametrize("name", ["nobody", "paris", "berlin"])
def test_a_false_speed_report_is_bounded_and_ignored_under_a_wrong_name(name):
    victim = Victim(Settings(keeps_pace=True))
    agent = victim.site.agent
    try:
        for _ in range(8):  # paris measures its own speed
            agent.stride(10**6)
            time.sleep(0.01)
        false_speed = Speed(name, 1e-9, 2**62)
        # A round that berlin ended after paris would have paris fall back first, by more the longer the call takes.
        with victim.exchange(timing=Timing(3600.0, false_speed, false_speed)):
            pass
        strides = []
        for _ in range(20):
            strides.append(agent.stride(10**6))
            time.sleep(0.01)
    finally:
        agent.close()
    assert max(strides) <= (1 if name != "berlin" else MOST_TOLD + 1)
    assert sum(strides) > 3 * len(strides) or name != "berlin"  # berlin's report was used
