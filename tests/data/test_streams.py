"""The streams of several replicas: they start together, before the first batch is requested, and end together."""

import json
import threading

import pytest

from noloco_jax.data import ReplicaStreams
from support.data_makers import CountingTokenizer, open_streams, write_counting

PREFETCHING = "grain-thread-prefetch"  # the prefetch threads' name


class MeetingTokenizer(CountingTokenizer):
    """Tokenizer that blocks each thread's first call until `number` threads have called; fails after five minutes."""

    def __init__(self, number: int):
        self._barrier = threading.Barrier(number, timeout=300)
        self._waited = threading.local()

    def encode_batch(self, texts):
        if not hasattr(self._waited, "once"):
            self._waited.once = True
            self._barrier.wait()
        return super().encode_batch(texts)


def streams_of(config, number=3, tokenizer=None):
    return ReplicaStreams(dict(enumerate(open_streams(config, number, tokenizer))))


def take(streams, count):
    return [[batch[name].tolist() for batch in next(streams).values() for name in batch] for _ in range(count)]


@pytest.fixture
def config(tmp_path):
    return write_counting("text", tmp_path / "data", 60)[0]


def test_requesting_a_batch_starts_all_streams_in_parallel(config):
    streams = streams_of(config, tokenizer=MeetingTokenizer(3))
    assert set(next(streams)) == {0, 1, 2}
    streams.close()


def test_started_streams_read_before_the_first_request(config):
    tokenizer = MeetingTokenizer(4)  # this thread is the fourth
    streams = streams_of(config, tokenizer=tokenizer)
    streams.start()
    tokenizer.encode_batch([])
    streams.close()


def test_prefetching_changes_neither_positions_nor_batches(config):
    started, fresh = streams_of(config), streams_of(config)
    before = json.dumps(fresh.get_state())
    started.start()
    assert json.dumps(started.get_state()) == before
    assert take(started, 3) == take(fresh, 3)
    states = started.get_state()
    expected = take(fresh, 2)
    again = streams_of(config)
    again.start()
    again.set_state(states | {7: {}})
    again.start()
    assert take(again, 2) == expected
    for streams in (started, fresh, again):
        streams.close()


def test_an_error_in_documents_read_ahead_is_raised_with_their_batch(tmp_path):
    config, _ = write_counting("jsonl", tmp_path / "data", 60)
    path = tmp_path / "data/part 0.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0] + '{"text": "no number"}\n' * 100)
    streams = streams_of(config, 1)
    streams.start()
    for _ in range(2):
        with pytest.raises(ValueError, match="'no'"):
            take(streams, 100)
    streams.close()


def test_closing_before_the_first_batch_ends_every_prefetch_thread(config):
    def prefetching():
        return {thread for thread in threading.enumerate() if thread.name.startswith(PREFETCHING)}

    before = prefetching()
    streams = streams_of(config)
    streams.start()
    assert len(prefetching() - before) == 3
    streams.close()
    assert not prefetching() - before
    with pytest.raises(ValueError, match="closed"):
        next(streams)


def test_a_process_without_replicas_has_empty_streams():
    streams = ReplicaStreams({})
    streams.start()
    assert next(streams) == {} and streams.get_state() == {}
    streams.set_state({0: {}})
    streams.close()
