"""Starting and catching up: a joiner trains only from the run's weights, and a donor never loses its own."""

from dataclasses import replace
from typing import Any

import pytest

from noloco_jax.islands.protocol.catch_up import ASKED_AT_ONCE
from noloco_jax.islands.protocol.context import MOST_AHEAD, STARTS_APART, Settings
from noloco_jax.islands.protocol.download import MOST_AT_ONCE
from noloco_jax.islands.protocol.events import (
    Admitted,
    Arrived,
    Begin,
    Broken,
    Close,
    Content,
    Heal,
    KeepShare,
    Open,
    Opened,
    Ready,
    Refused,
    RoundEnded,
    Send,
    Start,
    Tick,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import (
    PAST_INCARNATION,
    Busy,
    Caller,
    ExchangeId,
    NotPartner,
    Outcome,
    Share,
    State,
    StateRequest,
    Status,
    StatusRequest,
    Wrong,
)
from support.island_world import IDENTITY, ROUND, World

OTHERS = ["b", "c", "d"]
SETTINGS = Settings()
LOST = SETTINGS.lost_seconds
UNKNOWN = None
POSITION = Share(0, whole=False)


def journal(round: int = 5, lineage: bool = True, unresolved=()) -> Journal:
    return Journal(round, lineage, {ExchangeId(5, "b", 1, 1): Outcome.COMMITTED}, 0, unresolved)


def status(round: int, *, training: bool = True, lineage: bool = True) -> Status:
    return Status(1, round, training, lineage, 0, 0, 0.0, "")


def started(answers: dict, **arguments) -> tuple[Island, list]:
    """Return island "a" after the answers to its requests at start (None: no answer), and its actions then."""
    island = Island("a", OTHERS, IDENTITY, lambda round: OTHERS[round % 3], 7, **arguments)
    last = asked(island, Start(), answers)
    if Admitted() in last:
        last = asked(island, Ready(), answers)
    return island, last


def asked(island: Island, event: Any, answers: dict, now: float | None = 0.0) -> list:
    """Return an island's actions once its requests at an event have been answered."""
    assert now is not None
    last = []
    for call in [action for action in island.handle(event, now) if isinstance(action, Open)]:
        answer = answers.get(call.peer)
        event = Broken(call.channel) if answer is None else Arrived(call.channel, answer)
        last = island.handle(event, now + 0.1)
    return [action for action in last if not isinstance(action, Close)]


def waits_for(event: Any, answers: dict, island: Island, now: float = 0.0) -> tuple[float, list]:
    """Return the seconds that an island waits for the peers without an answer, and its actions then."""
    for call in [action for action in island.handle(event, now) if isinstance(action, Open)]:
        if call.peer in answers:
            island.handle(Arrived(call.channel, answers[call.peer]), now)
    deadline = island.next_deadline()
    assert deadline is not None
    return deadline - now, island.handle(Tick(), deadline)


def donor_of(actions: list) -> str:
    (call,) = [action for action in actions if isinstance(action, Open)]
    assert isinstance(call.header, StateRequest)
    return call.peer


def test_an_island_alone_resumes_from_its_checkpoint():
    assert started({}, journal=journal())[1] == [Begin(fresh=False)]


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ({"b": status(40)}, SETTINGS.rest_seconds),
        ({"b": status(40, lineage=False)}, SETTINGS.answer_seconds),  # others may have the run's weights
        ({"b": status(40, training=False)}, SETTINGS.answer_seconds),
    ],
)
def test_the_wait_for_silent_peers_is_short_once_one_trains_from_the_runs_weights(answers, seconds):
    """c and d are stopped, or behind a partition."""
    island = Island("a", OTHERS, IDENTITY, lambda round: None, 7, journal=journal())
    waited, actions = waits_for(Start(), answers, island)
    assert waited == seconds and Admitted() in actions


def test_an_island_with_weights_waits_for_silent_peers_only_once():
    """An island without weights waits each time, as a silent peer may have the run's."""
    island = Island("a", OTHERS, IDENTITY, lambda round: None, 7, journal=journal())
    assert waits_for(Start(), {}, island)[0] == SETTINGS.answer_seconds
    waited, actions = waits_for(Ready(), {}, island, 100.0)
    assert waited == SETTINGS.rest_seconds and Begin(fresh=False) in actions
    island = Island("a", OTHERS, IDENTITY, lambda round: None, 7, began_before=True)
    waits_for(Start(), {}, island)
    assert waits_for(Ready(), {}, island, 100.0)[0] == SETTINGS.answer_seconds


def test_the_first_island_of_a_run_begins():
    assert started({})[1] == [Begin(fresh=True)]


def test_islands_that_start_together_all_begin():
    assert started(dict.fromkeys(OTHERS, status(-1, training=False, lineage=False)))[1] == [Begin(fresh=True)]


@pytest.mark.parametrize("began_before", [False, True])
@pytest.mark.parametrize("first_round", [0, 99])
def test_an_island_without_weights_ends_where_all_that_answer_have_finished(began_before, first_round, monkeypatch):
    """Regression test: it waited for weights, or for its first round, which never came."""
    monkeypatch.setattr(Members, "first_round", lambda members, name: first_round)
    finished = replace(status(40, training=False), finished=True)
    island, actions = started(dict.fromkeys(OTHERS, finished), began_before=began_before)
    (refused,) = actions
    assert isinstance(refused, Refused) and refused.line.startswith("b, c, d finished in round 41 and no island trains")
    assert not any(isinstance(action, Open) for action in island.handle(Tick(), 700.0))


def test_an_island_without_weights_waits_a_while_for_a_silent_peer_beside_finished_ones():
    finished = replace(status(40, training=False), finished=True)
    answers = {"b": finished, "c": finished}
    for seconds, ends in ((1.0, False), (SETTINGS.start_seconds + 1.0, True)):
        island, actions = started(answers)
        assert not any(isinstance(action, Refused | Begin) for action in actions)
        assert any(isinstance(action, Refused) for action in asked(island, Tick(), answers, seconds + 1.0)) is ends


@pytest.mark.parametrize("trains", range(ASKED_AT_ONCE + 3))
def test_an_island_without_weights_finds_the_one_that_trains_among_many_finished_ones(trains):
    """Regression test: it ended with status 2 where the peers that it happened to ask had all finished."""
    names = [f"i{number}" for number in range(ASKED_AT_ONCE + 3)]
    answers = dict.fromkeys(names, replace(status(40, training=False), finished=True))
    answers[names[trains]] = status(38)
    island = Island("a", names, IDENTITY, lambda round: None, 7)
    asked(island, Start(), answers)
    actions = island.handle(Ready(), 0.0)
    while calls := [x for x in actions if isinstance(x, Open) and isinstance(x.header, StatusRequest)]:
        for call in calls:
            actions = island.handle(Arrived(call.channel, answers[call.peer]), 0.1)
    assert donor_of([action for action in actions if not isinstance(action, Close)]) == names[trains]


def test_an_island_without_weights_takes_those_of_a_peer_that_trains_beside_finished_ones():
    finished = replace(status(40, training=False), finished=True)
    assert donor_of(started({"b": finished, "c": status(38)})[1]) == "c"


def test_an_island_with_weights_trains_on_after_its_peers_have_finished():
    finished = replace(status(40, training=False), finished=True)
    assert started(dict.fromkeys(OTHERS, finished), journal=journal(39))[1] == [Begin(fresh=False)]


def test_an_island_that_has_lost_its_weights_does_not_begin_anew():
    island, actions = started({}, began_before=True)
    assert Begin(fresh=True) not in actions and "waits" in actions[0].line
    deadline = island.next_deadline()
    assert deadline is not None
    assert {type(action.header) for action in island.handle(Tick(), deadline) if isinstance(action, Open)} == {
        StatusRequest
    }


def test_a_checkpoint_is_used_within_patience_and_a_donor_beyond_it():
    near = dict.fromkeys(OTHERS, status(7))
    assert started(near, journal=journal(5))[1] == [Begin(fresh=False)]
    assert donor_of(started(dict.fromkeys(OTHERS, status(8)), journal=journal(5))[1]) in OTHERS


def test_one_island_far_ahead_makes_nobody_heal():
    answers = {"b": status(900), "c": status(6), "d": status(5)}
    assert started(answers, journal=journal(5))[1] == [Begin(fresh=False)]


@pytest.mark.parametrize(("rounds", "heals"), [((7, 7, 9), False), ((7, 8), True)])
def test_an_island_heals_after_two_consecutive_rounds_late_by_its_patience(rounds, heals):
    """The others have ended round `rounds[i]` when the island ends its round 5 + i."""
    island, actions = started({}, journal=journal(4))
    for own, others in enumerate(rounds, start=5):
        for name in OTHERS:
            island.peers[name].told(1, others, 0.0)
        actions = asked(island, RoundEnded(own, 1, 1.0), dict.fromkeys(OTHERS, status(others)))
    assert any(isinstance(action, Open) and isinstance(action.header, StateRequest) for action in actions) is heals


@pytest.mark.parametrize("late", ["b", "c"])
def test_a_donor_that_is_far_behind_is_not_asked_first(late):
    answers = {"b": status(50), "c": status(50)} | {late: status(40)}
    assert donor_of(started(answers)[1]) != late


@pytest.mark.parametrize("round", [4, 5])
def test_a_state_no_newer_than_the_own_weights_is_rejected(round):
    island, actions = started(dict.fromkeys(OTHERS, status(40)), journal=journal(5))
    after: list[Any] = island.handle(Arrived(actions[-1].channel, State(round, True, POSITION), Content(1.0)), 2.0)
    assert island.round == 5 and isinstance(after[-1].header, StateRequest)  # to the next donor


def test_an_island_that_has_ended_no_round_is_no_donor():
    donor, actions = started({})
    assert actions == [Begin(fresh=True)]
    assert donor.handle(Opened("x", "b", request("b", lineage=False)), 1.0)[0] == Send("x", NotPartner("no state yet"))


def test_a_donor_without_a_lineage_is_refused_on_both_sides():
    answers = {"b": status(50, lineage=False), "c": UNKNOWN, "d": UNKNOWN}
    assert "waits" in started(answers, began_before=True)[1][0].line
    donor, _ = started({}, journal=journal(50, lineage=False))
    answer = donor.handle(Opened("x", "b", request("b", lineage=True)), 1.0)[0]
    assert answer == Send("x", NotPartner("no exchange was ever committed here"))


def test_a_newcomer_prefers_a_donor_with_a_lineage_but_accepts_one_without():
    assert donor_of(started({"b": status(50, lineage=False), "c": status(40), "d": UNKNOWN})[1]) == "c"
    assert donor_of(started({"b": status(50, lineage=False)})[1]) == "b"


def test_an_island_waits_for_a_peer_that_has_weights_but_does_not_train_yet():
    assert "waits" in started({"b": status(50, training=False)})[1][0].line


def test_an_island_that_does_not_train_is_no_donor():
    assert (
        "waits"
        in started({"b": status(50, training=False), "c": status(3, lineage=False)}, began_before=True)[1][0].line
    )


def request(sender: str, *, lineage: bool = True) -> StateRequest:
    return StateRequest(Caller(IDENTITY, sender, "a", 1, -1), lineage, POSITION)


def test_a_donor_serves_a_limited_number_of_calls_per_island():
    donor, _ = started({}, journal=journal())
    for number in range(MOST_AT_ONCE):
        assert donor.handle(Opened(("b", number), "b", request("b")), 1.0) == [
            Send(("b", number), State(5, True, POSITION))
        ]
    refusal: Any = donor.handle(Opened("y", "b", request("b")), 1.0)[0]
    assert isinstance(refusal.header, Busy)
    assert donor.handle(Opened("z", "c", request("c")), 3.0) == [Send("z", State(5, True, POSITION))]
    donor.handle(Broken(("b", 0)), 2.0)
    assert donor.handle(Opened("w", "b", request("b")), 3.0) == [Send("w", State(5, True, POSITION))]


def test_a_state_request_of_an_earlier_version_is_refused_with_the_reason():
    donor, _ = started({}, journal=journal())
    answer: Any = donor.handle(Opened("x", "b", replace(request("b"), share=None)), 1.0)[0]
    assert "same version" in answer.header.reason


def downloading(shares: int, donors: str = "bcd") -> tuple[Island, dict[Any, tuple[str, int]]]:
    """Return island "a" that catches up, and its requests: channel -> (donor, number of the share)."""
    settings = replace(SETTINGS, shares=shares)
    island, actions = started(dict.fromkeys(donors, status(40)), journal=journal(), settings=settings)
    return island, requests(actions)


def requests(actions: list) -> dict[Any, tuple[str, int]]:
    calls = [(action, action.header) for action in actions if isinstance(action, Open)]
    found = [(call, header) for call, header in calls if isinstance(header, StateRequest)]
    return {call.channel: (call.peer, header.share.number) for call, header in found if header.share}


def give(island: Island, channel: Any, number: int, now: float, *, round: int = 40, norm: float = 1.0) -> list:
    return island.handle(Arrived(channel, State(round, True, Share(number, whole=False)), Content(norm)), now)


def test_each_share_comes_once_from_donors_in_parallel_and_the_position_last():
    island, open_calls = downloading(shares=9)
    assert {donor for donor, _ in open_calls.values()} == set(OTHERS)
    kept: list[int] = []
    now = 0.5
    while open_calls:
        channel, (_, number) = next(iter(open_calls.items()))
        now += 2.0
        actions = give(island, channel, number, now, round=40 + int(now) // 4)
        del open_calls[channel]
        open_calls |= requests(actions)
        kept += [action.number for action in actions if isinstance(action, KeepShare)]
    assert sorted(kept) == list(range(1, 10)) and number == 0
    assert isinstance(actions[-1], Heal) and actions[-1].round == island.round == 40 + int(now) // 4


def test_shares_missing_after_a_donor_stops_come_from_another_donor():
    island, open_calls = downloading(shares=4, donors="bc")
    (first, (silent, missing)), (other, (_, number)) = open_calls.items()
    asked = [missing, number]
    now = 2.0
    while True:
        actions = give(island, other, number, now)
        if not requests(actions):
            break
        ((other, (_, number)),) = requests(actions).items()
        asked.append(number)
        now += 1.5
    deadline = island.next_deadline()
    assert deadline is not None and deadline <= 0.5 + SETTINGS.share_seconds  # not for 600 s
    actions = island.handle(Tick(), deadline)
    assert Close(first) in actions
    ((other, (donor, number)),) = requests(actions).items()
    assert donor != silent and number == missing
    ((position, (donor, number)),) = requests(give(island, other, missing, deadline + 1)).items()
    assert number == 0 and donor != silent and sorted(asked) == [1, 2, 3, 4]
    assert isinstance(give(island, position, 0, deadline + 2)[-1], Heal)


def test_received_shares_are_kept_when_all_donors_fail():
    island, open_calls = downloading(shares=3, donors="b")
    ((channel, (_, first)),) = open_calls.items()
    ((channel, _),) = requests(give(island, channel, first, 1.5)).items()
    for _ in range(2):  # a donor that gave a share is asked once more
        actions = island.handle(Broken(channel), 2.0)
        channel = next(iter(requests(actions)), None)
    assert Begin(fresh=False) in actions  # from its own weights, until it queries its peers again
    island.peers["b"].told(1, 41, 3.0)
    again = requests(asked(island, RoundEnded(6, 1, 1.0), dict.fromkeys("bcd", status(41)), 3.0))
    numbers = []
    while again:
        channel, (_, number) = again.popitem()
        numbers.append(number)
        again |= requests(give(island, channel, number, 4.0, round=41))
    assert sorted(numbers) == sorted({0, 1, 2, 3} - {first})


def test_a_share_without_the_requested_lineage_is_discarded():
    settings = replace(SETTINGS, shares=2)
    island, actions = started({"b": status(40)}, began_before=True, settings=settings)
    channel, (_, number) = next(iter(requests(actions).items()))
    header = State(40, False, Share(number, whole=False))
    actions = island.handle(Arrived(channel, header, Content(1.0)), 1.0)
    assert not any(isinstance(action, KeepShare) for action in actions)


@pytest.mark.parametrize("donors", ["b", "bcd"])
def test_deadlines_advance_when_donors_fall_silent_with_several_shares_pending(donors):
    """Guard a regression: deadlines of an abandoned donor stayed in the past, and the island looped over the clock."""
    island, open_calls = downloading(shares=30, donors=donors)
    now = 0.2
    for _ in range(4 * len(donors)):
        channel, (_, number) = next(iter(open_calls.items()))
        now += 0.01
        del open_calls[channel]
        open_calls |= requests(give(island, channel, number, now))
    assert len(open_calls) > 2 * len(donors)
    for _ in range(100):
        deadline = island.next_deadline()
        if deadline is None or deadline > 3000:
            break
        assert deadline > now
        now = deadline
        island.handle(Tick(), now)


def test_a_busy_donor_is_waited_for_no_longer_than_the_share_timeout():
    island, open_calls = downloading(shares=1, donors="b")
    ((channel, _),) = open_calls.items()
    island.handle(Arrived(channel, Busy(1e12)), 1.0)
    deadline = island.next_deadline()
    assert deadline is not None and deadline <= 1.0 + SETTINGS.share_seconds


def test_nonfinite_weights_are_requested_again_from_another_donor():
    island, open_calls = downloading(shares=1, donors="bc")
    ((channel, (bad, number)),) = open_calls.items()
    assert number == 1
    ((channel, (donor, number)),) = requests(give(island, channel, 1, 1.0, norm=float("nan"))).items()
    assert (donor != bad, number) == (True, 1)


def test_a_donor_drops_a_client_that_never_reads():
    donor, _ = started({}, journal=journal())
    donor.handle(Opened("x", "b", request("b")), 1.0)
    assert donor.next_deadline() == 601.0
    assert donor.handle(Tick(), 601.0) == [Close("x")]
    assert donor.next_deadline() is None


@pytest.mark.parametrize(
    "failure",
    [
        Broken,
        lambda c: Arrived(c, Busy(1.0)),
        lambda c: Arrived(c, NotPartner("no")),
        lambda c: Arrived(c, State(40, True, POSITION), Content(float("nan"))),
    ],
)
def test_the_next_donor_is_asked_after_one_fails(failure):
    island, actions = started({"b": status(40), "c": status(40)}, began_before=True)
    first = donor_of(actions)
    second: list[Any] = island.handle(failure(actions[-1].channel), 1.0)
    assert {first, donor_of(second)} == {"b", "c"}
    call = second[-1]
    healed = island.handle(Arrived(call.channel, State(41, True, POSITION), Content(1.0)), 2.0)
    assert healed[-1] == Heal(call.peer, 41, True)
    assert (island.round, island.incarnation, island.status().lineage) == (41, 8, True)


def test_status_requests_are_answered_for_the_current_weights():
    """The exchange is part of the checkpoint's weights, and not of the donor's, which replace them."""
    xid = ExchangeId(5, "b", 1, 1)
    island, actions = started(dict.fromkeys(OTHERS, status(40)), journal=journal())

    def outcome() -> Outcome | None:
        answer: Any = island.handle(Opened("x", "b", StatusRequest(IDENTITY, xid)), 1.0)[0]
        return answer.header.outcome

    assert outcome() is Outcome.COMMITTED
    island.handle(Arrived(actions[-1].channel, State(40, True, POSITION), Content(1.0)), 2.0)
    assert outcome() is Outcome.ABORTED


def test_an_exchange_unresolved_at_the_checkpoint_is_logged_as_one_sided():
    unresolved = ((ExchangeId(5, "a", 6, 1), "b"),)
    island = Island("a", OTHERS, IDENTITY, lambda round: "b", 7, journal=journal(unresolved=unresolved))
    actions: list[Any] = island.handle(Start(), 0.0)
    assert actions[0][:2] == (5, "b") and actions[0].one_sided


def test_the_journal_survives_json():
    assert Journal.from_json(journal(unresolved=((ExchangeId(5, "a", 6, 1), "b"),)).to_json()) == journal(
        unresolved=((ExchangeId(5, "a", 6, 1), "b"),)
    )


def test_an_island_stops_only_when_more_than_half_of_its_peers_refuse_it():
    one = started({"b": Wrong("model"), "c": status(5), "d": status(5)}, journal=journal())[1]
    assert one[-1] == Begin(fresh=False)
    actions = started({"b": Wrong("model"), "c": status(5), "d": Wrong("model")})[1]
    assert actions[-1].line.startswith("2 of 3 islands refuse a; ") and " says: model: give all" in actions[-1].line
    assert not any(isinstance(action, Begin | Open) for action in actions)


def test_joiners_choose_different_donors():
    world = World(8, durations=[ROUND] * 8)
    world.run(35.0)
    for name in ("i6", "i7"):
        world.crash(world.nodes[name], "lose disk")
    world.run(35.0 + 13 * ROUND).finish()
    donors = [heal.peer for name in ("i6", "i7") for heal in world.nodes[name].heals]
    assert len(donors) == len(set(donors)) == 2
    assert world.participation(10, 14) == 1


@pytest.mark.parametrize("count", [3, 4, 18])
@pytest.mark.parametrize("one_stays_away", [False, True])
def test_islands_that_all_lost_their_weights_begin_anew_and_meet(count, one_stays_away):
    """Include more islands than one queries at once."""
    world = World(count, durations=[ROUND] * count)
    world.run(0.5 * ROUND)
    for node in world.nodes.values():
        world.crash(node, "lose disk")
    if one_stays_away:
        world.nodes["i0"].process += 1  # invalidates its scheduled start
    began = LOST if one_stays_away else 4 * ROUND
    world.run(began + 14 * ROUND).finish()
    alive = list(world.nodes.values())[one_stays_away:]
    assert all(max(node.ends, default=-1) >= 6 for node in alive)
    assert sum(len(node.applied) for node in alive) >= (2 if one_stays_away and count == 3 else 4) * len(alive)


def test_fewer_than_half_of_the_islands_never_begin_anew():
    """The absent ones may have the weights."""
    world = World(5, durations=[ROUND] * 5)
    world.run(0.5 * ROUND)
    for node in world.nodes.values():
        world.crash(node, "lose disk")
    for name in ("i0", "i1", "i2"):
        world.nodes[name].process += 1
    world.run(3 * LOST)
    assert not world.nodes["i3"].ends and any("waits for" in line for line in world.nodes["i3"].lines)


def test_an_island_waits_beyond_the_loss_timeout_for_a_peer_with_the_runs_weights():
    """b has the run's weights and does not train yet; c began anew, d is away."""
    said = {"b": status(50, training=False), "c": status(3, lineage=False)}
    island, actions = started(said, began_before=True)
    assert "waits" in actions[0].line
    for _ in range(40):
        deadline = island.next_deadline()
        assert deadline is not None
        last = []
        for call in [action for action in island.handle(Tick(), deadline) if isinstance(action, Open)]:
            event = Arrived(call.channel, said[call.peer]) if call.peer in said else Broken(call.channel)
            last = island.handle(event, deadline)
        assert not any(isinstance(action, Begin | Open) for action in last)
    assert deadline > LOST


def test_an_island_without_weights_queries_all_peers_within_three_sweeps():
    names = [f"i{number}" for number in range(40)]
    island = Island("a", names, IDENTITY, lambda round: None, 7, began_before=True)
    nothing = status(-1, training=False, lineage=False)
    last = asked(island, Start(), dict.fromkeys(names, nothing))
    assert Admitted() in last
    last = asked(island, Ready(), dict.fromkeys(names, nothing))
    sweeps = 1
    while Begin(fresh=True) not in last:
        sweeps += 1
        last = asked(island, Tick(), dict.fromkeys(names, nothing), island.next_deadline())
    assert sweeps == 3


def test_an_island_that_lost_its_workdir_and_incarnation_exchanges_again_at_once():
    """The others know a higher incarnation than its clock suggests."""
    world = World(4, durations=[ROUND] * 4)
    world.run(5.5 * ROUND)
    lost = world.nodes["i1"]
    world.crash(lost, "lose disk")
    lost.incarnation = -5
    world.run(20.5 * ROUND).finish()
    assert world.participation(10, 19) == 1
    assert all("past incarnation" not in drop.reason for drop in lost.drops)
    assert any("workdir was lost" in line for line in lost.lines)


def test_an_island_refused_as_a_past_incarnation_queries_its_peers_after_the_round():
    """No peer answered when it started."""
    island, _ = started({}, journal=journal(4))
    (dial,) = [action for action in island.handle(RoundEnded(5, 1, 1.0), 1.0) if isinstance(action, Open)]
    island.handle(Arrived(dial.channel, NotPartner(PAST_INCARNATION)), 1.1)
    asked(island, RoundEnded(6, 1, 1.0), {"b": replace(status(6), yours=1000)}, 2.0)
    assert island.incarnation == 1000 + STARTS_APART


@pytest.mark.parametrize("told", [10**6, 2**62])
def test_a_peer_raises_an_incarnation_only_within_the_bound_and_before_any_exchange(told):
    island, _ = started({"b": replace(status(5), yours=told)}, journal=journal())
    assert island.incarnation == (told + STARTS_APART if told < MOST_AHEAD else 7)
    island._context.commits = 1
    before = island.incarnation
    island.peers["b"].told(1, 50, 0.0)
    asked(island, RoundEnded(6, 1, 1.0), {"b": replace(status(7), yours=before + 1)})
    assert island.incarnation == before
