"""Tokenize texts once, to Parquet files, for large data and for runs that read them many times.

    python -m noloco_jax.tokenize --config=configs/c4_125m.py --config.data.path=c4/en --out=tokens --workers=8
    python -m noloco_jax.train --config=configs/c4_125m.py --config.data.kind=parquet --config.data.path=tokens \\
        --workdir=DIR

The texts are those of `data.path` and `data.validation_path`, of any `data.kind`; they go to DIR/train and
DIR/validation. A row is a document in the order of the files: `input_ids` (int32), with BOS and EOS where
`data.add_bos` and `data.add_eos` ask for them, and `attention_mask` (int8), which is 1. Training on them differs from
training on the texts in one thing: a document's last token has no label.

Stopped or killed at any moment, the same command continues after the last whole shard, to the same files. A folder
appears under its name when all its shards are written.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noloco_jax.config import TrainConfig, parse_args
from noloco_jax.cores import usable_cores
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, full_disk_told, one_command_in, write_whole
from noloco_jax.formatting import format_clock, format_count, format_tokens_per_second

SETTINGS_FILE = "tokenize.json"
_LOCK_FILE = ".lock"
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenize the training and the validation documents; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.tokenize")
    if flags.workers < 0:
        raise UserError(f"--workers={flags.workers} is below 0: it is how many processes tokenize")
    if flags.shard_tokens < 1:
        raise UserError(f"--shard_tokens={flags.shard_tokens} is below 1: it is how many tokens a file holds")
    check_writable(flags.out)
    try:
        with full_disk_told(flags.out, "the same command continues after the last shard"):
            _tokenize(config, flags.out, flags.workers, flags.shard_tokens)
    except KeyboardInterrupt:
        print("stopped: the same command continues after the last shard", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(usable_cores()),
        metavar="N",
        help="processes that tokenize (default: the cores; 0: this one)",
    )
    parser.add_argument(
        "--shard_tokens", type=int, default=2**26, metavar="N", help="tokens of a file (default %(default)s)"
    )


def _tokenize(config: TrainConfig, out: Path, workers: int, shard_tokens: int) -> None:
    from noloco_jax.data import check_vocabulary, load_tokenizer  # imported late, for --help
    from noloco_jax.data.documents import Loader
    from noloco_jax.data.run_data import encoder_of, open_source
    from noloco_jax.tools.token_shards import Progress, write_split

    data, vocab_size = replace(config.data, shuffle_buffer=1), config.model.vocab_size
    if data.kind == "mixture":
        raise UserError("data.kind='mixture': tokenize each source by itself, and mix the folders of tokens")
    splits = {
        name: open_source(data, validation=name == "validation", seed=0, vocab_size=vocab_size)
        for name in ("train", "validation")
    }
    for source in splits.values():
        if source.num_columns > 1:
            raise UserError(f"{source.name} holds tokens already: train on them as they are")
        source.check_replicas(1)
    tokenizer = load_tokenizer(data.tokenizer)
    check_vocabulary(tokenizer, vocab_size)
    encode = encoder_of(data, tokenizer, vocab_size)
    settings = {
        "data.tokenizer": f"{tokenizer.name} ({tokenizer.fingerprint})",
        "data.add_bos": data.add_bos,
        "data.add_eos": data.add_eos,
        "--shard_tokens": shard_tokens,
        **{f"{split} documents": dict(source.fingerprint) for split, source in splits.items()},
    }
    loader = Loader(splits, encode, workers)
    in_use = f"--out={out} is in use by another tokenize"
    with one_command_in(out, _LOCK_FILE, in_use), contextlib.closing(loader):
        _check_settings(out, settings)
        for split, source in splits.items():
            started = time.monotonic()

            def report(progress: Progress, split: str = split, started: float = started) -> None:
                seconds = time.monotonic() - started
                speed = format_tokens_per_second(progress.tokens_now / seconds)
                print(
                    f"{split}: {progress.shards} files, {format_count(progress.tokens)} tokens of "
                    f"{format_count(progress.documents)} documents, {speed}, {format_clock(seconds)}",
                    flush=True,
                )

            write_split(source, loader, out / split, shard_tokens, report)
    print(f"train with --config.data.kind=parquet --config.data.path={out}")


def _check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` where the folder holds something else; write the settings into a new one."""
    path = out / SETTINGS_FILE
    if not path.exists():
        if any(file.name != _LOCK_FILE for file in out.iterdir()):
            raise UserError(f"--out={out} holds other files: give another folder, or an empty one")
        write_whole(path, json.dumps(settings, indent=1) + "\n")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name in settings | there:
        if settings.get(name) != there.get(name):
            raise UserError(
                f"--out={out} was begun with {name} {there.get(name)!r}, and now it is {settings.get(name)!r}: "
                "give what it was begun with, or another --out"
            )
