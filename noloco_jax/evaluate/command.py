"""Measure the perplexity of a trained model on texts.

    python -m noloco_jax.evaluate --workdir=DIR                               # on the run's own validation documents
    python -m noloco_jax.evaluate --workdir=DIR --data=book.txt --data=news.jsonl --replica=0
    python -m noloco_jax.evaluate --model=FOLDER --data=book.txt              # a Hugging Face folder

Documents are packed into sequences as in training, one after the other, and every token counts once, with what stands
before it in its sequence. A perplexity is a token's: models of other tokenizers are comparable by bits per byte.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from noloco_jax.config import DataConfig, TrainConfig, make_parser, validate
from noloco_jax.data import HostBatch, Tokenizer, open_documents, open_validation, whole_batches
from noloco_jax.data.json_lines import SUFFIXES as JSON_LINES_SUFFIXES
from noloco_jax.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_perplexity
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.model.kind import Params
from noloco_jax.patience import told_if_slow
from noloco_jax.run.evaluate import loss_of_one, perplexity_of
from noloco_jax.run.given_model import GivenModel, define_model_flags, opened_model
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs

_KINDS = ("jsonl", "parquet", "text")
_TOKENS_OF_BATCH = 8192


class _Text(NamedTuple):
    """Texts to evaluate on: what to call them, and their batches."""

    name: str
    batches: Iterator[HostBatch]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the perplexity on each text."""
    args = _parser().parse_args(argv)
    for flag in ("tokens", "sequence_length"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UserError(f"--{flag}={value} is below 1: raise it")
    with opened_model(args) as model:
        config = _config(model, args.sequence_length)
        texts = list(_texts(args, model, config))
        params = model.load()
    programs = build_programs(config, make_mesh(config, jax.local_devices()[:1]))
    params = _on_device(programs, params)
    print(model.name)
    print("perplexity  bits per byte      tokens  text")
    per_batch = config.data.batch_size * config.data.sequence_length
    limit = None if args.tokens is None else -(-args.tokens // per_batch)
    for text in texts:
        with told_if_slow(f"evaluating on {text.name}: --tokens=N ends it after about N of them"):
            print(_row(programs, params, model, text, limit), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.evaluate")
    define_model_flags(parser)
    parser.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help="a file, folder or address with texts, all of which are evaluated; may be repeated (default: what "
        "validates the run, each source of a mixture apart)",
    )
    parser.add_argument(
        "--kind", choices=_KINDS, help="format of the files (default: by a file's name; in a folder, the run's or text)"
    )
    parser.add_argument("--text_column", help="field or column of the text (default: the run's, else text)")
    parser.add_argument("--sequence_length", type=int, help="default: the run's; of a folder up to 2,048")
    parser.add_argument("--tokens", type=int, help="stop on each text after about this many (default: at its end)")
    return parser


def _config(model: GivenModel, sequence_length: int | None) -> TrainConfig:
    """Return a run of one replica of the model, with batches of `_TOKENS_OF_BATCH` tokens."""
    if sequence_length is None:
        sequence_length = model.data.sequence_length
    batch_size = max(1, _TOKENS_OF_BATCH // sequence_length)
    data = dataclasses.replace(model.data, sequence_length=sequence_length, batch_size=batch_size)
    config = TrainConfig(method="local", num_replicas=1, model=model.config, data=data)
    validate(config)
    return config


def _texts(args: argparse.Namespace, model: GivenModel, config: TrainConfig) -> Iterator[_Text]:
    """Open the texts; raise `UserError` for those that are missing or of another form."""
    vocab_size = model.config.vocab_size
    if args.data is None:
        if args.model is not None:
            raise UserError("what to evaluate on is missing: give --data=PATH")
        for group, batches in open_validation(config.data, model.found_tokenizer, vocab_size=vocab_size).items():
            yield _Text(f"validation of {group}", batches)
        return
    for path in args.data:
        data = dataclasses.replace(config.data, path=path, kind=args.kind or _kind_of(path, config.data))
        if args.text_column is not None:
            data = dataclasses.replace(data, text_column=args.text_column)
        documents = open_documents(data, model.found_tokenizer, field="--data", vocab_size=vocab_size)
        if documents.num_columns == 1:
            model.tokenizer()  # raises where there is none
        documents.check_replicas(1)  # reads the first
        yield _Text(path, whole_batches(documents, data))


def _kind_of(path: str, data: DataConfig) -> str:
    """Return the format of a file by its name, and of a folder that of the model's training."""
    if not Path(path).expanduser().is_dir() and Path(path).suffix:
        by_suffix = {"jsonl": JSON_LINES_SUFFIXES, "parquet": PARQUET_SUFFIXES}
        return next((kind for kind, suffixes in by_suffix.items() if path.endswith(suffixes)), "text")
    return {"c4": "jsonl"}.get(data.kind, data.kind if data.kind in _KINDS else "text")


def _row(programs: Programs, params: Params, model: GivenModel, text: _Text, limit: int | None) -> str:
    """Evaluate a text, or its first `limit` batches; return its line of the table."""
    num_bytes = 0

    def counted() -> Iterator[HostBatch]:
        nonlocal num_bytes
        for batch in itertools.islice(text.batches, limit):
            if model.found_tokenizer is not None:
                num_bytes += _num_bytes(model.found_tokenizer, batch["labels"])
            yield batch

    loss, tokens = loss_of_one(programs, params, counted())
    bits = f"{loss / math.log(2) / num_bytes:.4f}" if num_bytes else "unknown"
    return f"{format_perplexity(perplexity_of(loss / tokens)):>10}  {bits:>13}  {tokens:>10,}  {text.name}"


def _num_bytes(tokenizer: Tokenizer, labels: np.ndarray) -> int:
    """Count the bytes of text of the tokens to predict, in their order; special tokens have none."""
    return len(tokenizer.decode(labels[labels != IGNORED_LABEL].tolist()).encode())


def _on_device(programs: Programs, params: Params) -> Params:
    """Put one model's weights on the device as those of a run of one replica."""
    return jax.tree.map(lambda x, place: jax.device_put(x[None], place.sharding), params, programs.state.params)
