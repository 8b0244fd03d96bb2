"""Mixtures: every source has its share of the tokens, and is read as if it were the only one."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from noloco_jax.config import DataConfig, SourceConfig
from noloco_jax.config.schema import Entries
from noloco_jax.data import RunData, Stream, redistribute
from noloco_jax.data.positions import DataPosition, shard_start
from noloco_jax.data.run_data import configs_by_source
from noloco_jax.data.stream import Mixture
from noloco_jax.errors import UserError
from support.data_makers import (
    SOURCE_IDS,
    SOURCES,
    CountingTokenizer,
    before_next_document,
    check_data,
    open_streams,
    validation_batches,
    write_counting,
    write_json_lines,
    write_mixture,
)

WEIGHTS = [
    {"a": 0.7, "b": 0.3},
    {"a": 1, "b": 1, "c": 1},
    {"a": 1e-3, "b": 0.5, "c": 2},
    {"a": 0.05, "b": 0.15, "c": 0.3, "d": 0.5},
    {"a": 1e308, "b": 1e308},
]


def group_of(token):
    return f"data.mixture.{list(SOURCES)[int(token) // SOURCE_IDS]}"


def take(stream, count):
    return [next(stream) for _ in range(count)]


def sequences(batches):
    """Return (inputs, labels) of every sequence of `batches` as tuples."""
    return [
        (tuple(inputs.tolist()), tuple(labels.tolist()))
        for batch in batches
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def assert_same(left, right):
    assert sequences(left) == sequences(right) and len(left) == len(right)


def with_source(config, name, **fields):
    return replace(config, mixture=Entries(config.mixture | {name: replace(config.mixture[name], **fields)}))


def read_epochs(streams, last_epoch):
    """Return the ids of all sources through `last_epoch`; batches must hold one token."""
    ids = []
    for stream in streams:
        while True:
            positions = stream.get_state()["positions"]
            left = {group for group, position in positions.items() if position["shards"][0][0] <= last_epoch}
            if not left:
                break
            token = next(stream)["input_ids"].item()
            if group_of(token) in left:
                ids.append(token)
    return ids


def every_id(counts):
    return [SOURCE_IDS * k + token for k, count in enumerate(counts.values()) for token in range(count)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_section_of_the_order_holds_each_source_in_its_share(weights):
    mixture, total = Mixture(weights), sum(map(Fraction, weights.values()))
    drawn = [mixture.source_at(place) for place in range(20_000)]
    for name, weight in weights.items():
        share = Fraction(weight) / total
        assert mixture.shares[name] == float(share)
        ahead = np.cumsum(np.equal(drawn, name)) - float(share) * np.arange(1, len(drawn) + 1)
        assert np.ptp(ahead) < 5 and abs(ahead).max() < 4


def test_weights_are_shares_of_tokens_whatever_the_document_lengths(tmp_path):
    write_json_lines(tmp_path / "long.jsonl", [f"{5000 * k} 5000" for k in range(20)])
    write_json_lines(tmp_path / "short.jsonl", [f"{200_000 + k} 1" for k in range(300)])
    sources = {name: SourceConfig("jsonl", weight, str(tmp_path / f"{name}.jsonl"))
               for name, weight in (("long", 3.0), ("short", 1.0))}  # fmt: skip
    config = DataConfig(
        kind="mixture", mixture=Entries(sources), add_bos=False, add_eos=False, sequence_length=16, batch_size=4
    )
    for stream in open_streams(config, 2):
        tokens = np.concatenate([batch["input_ids"].ravel() for batch in take(stream, 300)])
        assert abs(int((tokens < 200_000).sum()) - 0.75 * len(tokens)) <= 3 * 16
        stream.close()


def test_a_mixture_resumes_bitwise_at_any_position(tmp_path):
    config, _ = write_mixture(tmp_path)
    (whole,), saved, batches = open_streams(config, 1), [], []
    for _ in range(50):
        saved.append(json.dumps(whole.get_state()))
        batches.append(next(whole))
    (again,) = open_streams(config, 1)
    for start in [0, 49, *np.random.default_rng(0).integers(0, 50, 4).tolist()]:
        again.set_state(json.loads(saved[start]))
        assert json.dumps(again.get_state()) == saved[start]
        assert_same(take(again, 50 - start), batches[start:])
    assert again.get_state() == whole.get_state()


def test_changing_the_number_of_replicas_skips_and_repeats_no_token(tmp_path):
    config, counts = write_mixture(tmp_path)
    one_by_one = replace(config, sequence_length=1, batch_size=1)
    for numbers in [(4, 2), (2, 4), (3, 5, 2)]:
        streams, delivered = open_streams(config, numbers[0]), []
        for following in numbers[1:]:
            for stream in streams:
                delivered += [token for inputs, _ in sequences(take(stream, 2)) for token in inputs]
            states = redistribute([stream.get_state() for stream in streams], following)
            streams = open_streams(config, following)
            for stream, state in zip(streams, json.loads(json.dumps(states)), strict=True):
                stream.set_state(state)
        last_epoch = max(position["epoch"] for state in states for position in state["positions"].values())
        finishing = open_streams(one_by_one, numbers[-1])
        for stream, state in zip(finishing, states, strict=True):
            for group, alone in configs_by_source(config).items():
                state = before_next_document(alone, state, group)
            stream.set_state(state)
        delivered += read_epochs(finishing, last_epoch)
        assert Counter(delivered) == dict.fromkeys(every_id(counts), last_epoch + 1), numbers


def test_added_replicas_continue_the_order_of_sources(tmp_path):
    config, _ = write_mixture(tmp_path)
    streams = open_streams(config, 3)
    for replica, stream in enumerate(streams):
        take(stream, 4 + replica)
    states = redistribute([stream.get_state() for stream in streams], 5)
    drawn = [state["drawn"] for state in states]
    assert drawn == [8, 10, 12, 8, 10]
    order = Mixture({f"data.mixture.{name}": source.weight for name, source in config.mixture.items()})
    for replica, stream in enumerate(open_streams(config, 5)):
        stream.set_state(states[replica])
        found = [group_of(inputs[0]) for inputs, _ in sequences(take(stream, 2))]
        assert found == [order.source_at(drawn[replica] + replica + k) for k in range(4)]


def test_changed_weights_apply_from_the_resume_and_sources_keep_their_positions(tmp_path):
    config, _ = write_mixture(tmp_path)
    changed = with_source(config, "books", weight=90.0)
    (stream,), (other,) = open_streams(config, 1), open_streams(changed, 1)
    before = sequences(take(stream, 25))
    other.set_state(stream.get_state())
    after = sequences(take(other, 50))
    found = Counter(group_of(inputs[0]) for inputs, _ in after)
    assert abs(found["data.mixture.books"] - 100 * 90 / 99) < 4
    for group, alone in configs_by_source(config).items():
        both = [sequence for sequence in before + after if group_of(sequence[0][0]) == group]
        assert both == sequences(take(open_streams(replace(alone, batch_size=1), 1)[0], len(both)))


def test_a_state_of_other_sources_is_refused_naming_the_source(tmp_path):
    config, _ = write_mixture(tmp_path)
    (stream,) = open_streams(config, 1)
    larger, _ = write_counting("jsonl", tmp_path / "larger", 29)
    fewer = replace(config, mixture=Entries({name: config.mixture[name] for name in ("web", "own")}))
    for other, named in (
        (with_source(config, "own", path=larger.path), "data.mixture.own bytes"),
        (fewer, "data.mixture.books kind None"),
        (replace(larger, kind="jsonl"), "kind 'jsonl'"),
    ):
        with pytest.raises(UserError, match="restore the former data") as caught:
            open_streams(other, 1)[0].set_state(stream.get_state())
        assert named.split()[0] in str(caught.value)


@pytest.fixture
def held_out(tmp_path):
    """A mixture of 3 : 1 with 400 tokens of "web" to validate on and 25 of "own"."""
    sources = {}
    for name, weight, first, count in (("own", 1.0, 500_000, 25), ("web", 3.0, 0, 400)):
        write_json_lines(tmp_path / name / "train.jsonl", ["900 5"] * 9)
        write_json_lines(tmp_path / name / "validation.jsonl", [f"{first + k} 5" for k in range(0, count, 5)])
        sources[name] = SourceConfig("jsonl", weight, str(tmp_path / name))
    return DataConfig(
        kind="mixture", mixture=Entries(sources), add_bos=False, add_eos=False, sequence_length=4, batch_size=3
    )


def test_validation_interleaves_the_sources_each_read_as_if_alone(held_out):
    batches = validation_batches(held_out, CountingTokenizer(), num_batches=5)
    assert_same(batches, validation_batches(held_out, CountingTokenizer(), num_batches=5))
    alone = {
        group: iter(sequences(validation_batches(replace(one, batch_size=1), CountingTokenizer(), num_batches=99)))
        for group, one in configs_by_source(held_out).items()
    }
    order = Mixture({"data.mixture.own": 1, "data.mixture.web": 3})
    assert sequences(batches) == [next(alone[order.source_at(place)]) for place in range(15)]


def test_validation_ends_with_the_first_exhausted_source_to_keep_the_shares(held_out):
    batches = validation_batches(held_out, CountingTokenizer(), num_batches=1000)
    found = sequences(batches)
    own = [inputs for inputs, _ in found if inputs[0] >= 500_000]
    assert own == [tuple(range(500_000 + k, 500_004 + k)) for k in range(0, 24, 4)]
    scored = [inputs for inputs, labels in found if set(labels) != {-100}]
    assert abs(len(scored) - 4 * len(own)) <= 8 and len(scored) < len(found) == 3 * len(batches)


@pytest.mark.parametrize("num_batches", [5, 1000])
def test_validation_by_source_equals_validating_each_source_alone(held_out, num_batches):
    found = RunData(held_out, seed=0).validation_by_source(CountingTokenizer(), num_batches)
    assert list(found) == ["own", "web"]
    for group, alone in configs_by_source(held_out).items():
        expected = validation_batches(alone, CountingTokenizer(), num_batches=num_batches)
        assert_same(found[group.removeprefix("data.mixture.")], expected)
        assert RunData(alone, seed=0).validation_by_source(CountingTokenizer(), num_batches) == {}


def test_errors_in_the_data_of_a_source_name_the_source(tmp_path):
    config, _ = write_mixture(tmp_path)
    check_data(config, num_replicas=3)
    (tmp_path / "nothing.jsonl").write_text("")
    write_json_lines(tmp_path / "blank.jsonl", [""] * 5)
    for name, fields, message in (
        (
            "web",
            {"path": str(tmp_path / "nowhere")},
            "data.mixture.web.path='.*nowhere': there is no such file",
        ),
        ("own", {"validation_path": str(tmp_path / "nowhere")}, "data.mixture.own.validation_path='.*nowhere'"),
        ("own", {"path": str(tmp_path / "nothing.jsonl"), "validation_path": ""}, "give data.mixture.own.validation"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_data(with_source(config, name, **fields))
        assert "\n" not in str(caught.value)
    blank = with_source(config, "own", path=str(tmp_path / "blank.jsonl"), validation_path=config.mixture["own"].path)
    (stream,) = open_streams(blank, 1)
    for _ in range(2):  # a second attempt fails at the same place
        with pytest.raises(UserError, match=r"hold no token: data\.mixture\.own\.path="):
            take(stream, 9)
    assert stream.get_state()["drawn"] < 18


def test_a_batch_that_fails_halfway_loses_no_sequence_of_any_source():
    """Each document is a sequence of one number; one of them can be read only at the second attempt."""

    def stream_of(broken):
        broken = {("b", broken)}

        def numbers(name, position):
            for number in itertools.count(position.shards[0].document):
                if (name, number) in broken:
                    broken.remove((name, number))
                    raise OSError("not now")
                after = shard_start(0, 0, 1)._replace(document=number + 1)
                yield {"input_ids": np.array([number + 1000 * (name == "b")])}, DataPosition(0, (after,))

        return Stream(numbers, Mixture({"a": 0.7, "b": 0.3}), 8, {"replica": 0, "num_replicas": 1, "source": {}})

    whole, interrupted = stream_of(None), stream_of(3)  # the fourth sequence of b, in the second batch
    for k in range(6):
        expected, before = next(whole), interrupted.get_state()
        if k == 1:
            with pytest.raises(OSError):
                next(interrupted)
            assert interrupted.get_state() == before
        np.testing.assert_array_equal(next(interrupted)["input_ids"], expected["input_ids"])
    assert interrupted.get_state() == whole.get_state()
    whole.close()
    interrupted.close()
