"""Measure the perplexity of a trained model on texts.

    python -m noloco_jax.evaluate --workdir=DIR                               # on what validates the run, all of it
    python -m noloco_jax.evaluate --workdir=DIR --data=book.txt --data=news.jsonl --replica=0
    python -m noloco_jax.evaluate --model=FOLDER --data=book.txt              # a Hugging Face folder

Documents are packed into sequences as in training, one after the other, and every token counts once, with what stands
before it in its sequence. A perplexity is a token's: models of other tokenizers are comparable by bits per byte, on
sequences of equal lengths.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from noloco_jax.checkpoint.given_model import GivenModel, define_model_flags, opened_model
from noloco_jax.checkpoint.trained_model import data_facts
from noloco_jax.config import DataConfig, TrainConfig, from_dict, make_parser
from noloco_jax.data import RunData, Tokenizer
from noloco_jax.data.find_files import SUFFIXES
from noloco_jax.data.run_data import batches_of, configs_by_source, encoder_of, open_documents, open_source
from noloco_jax.data.source import Source
from noloco_jax.errors import UserError, log_if_slow, tell
from noloco_jax.formatting import format_perplexity
from noloco_jax.metrics.evaluate import loss_of_one, perplexity_of
from noloco_jax.model.architecture import Params
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs

_KINDS = ("jsonl", "parquet", "text")
_TOKENS_OF_BATCH = 8192


class _CountingTokenizer:
    """A tokenizer that counts the documents that it encodes, their bytes and their tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.num_documents, self.num_bytes, self.num_tokens = tokenizer, 0, 0, 0
        self.name, self.fingerprint, self.vocab_size = tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size
        self.bos_id, self.eos_id, self.decode = tokenizer.bos_id, tokenizer.eos_id, tokenizer.decode

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        arrays = self._tokenizer.encode_batch(texts)
        self.num_documents += sum(map(bool, texts))  # an empty one gets neither BOS nor EOS
        self.num_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)
        self.num_tokens += sum(map(len, arrays))
        return arrays

    def num_labels(self, data: DataConfig) -> int:
        """Return the number of labels in the encoded text: all tokens but the first, of all or of each document."""
        special = self.num_documents * (data.add_bos + data.add_eos)
        return self.num_tokens + special - (self.num_documents if data.document_mask else 1)


class _Text(NamedTuple):
    """Documents to evaluate on, their name in the table, and their tokenizer; None if they are token ids."""

    name: str
    documents: Source
    counted: _CountingTokenizer | None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the perplexity on each text."""
    args = _parser().parse_args(argv)
    for flag in ("tokens", "sequence_length"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UserError(f"--{flag}={value} is below 1: raise it")
    with opened_model(args) as model:
        config = _config(model, args)
        texts = _given_texts(args, model) if args.data else _validation(args, model)
        name, params = model.load()
    programs = build_programs(config, make_mesh(config.mesh, 1, jax.local_devices()[:1]))
    params = _to_device(programs, params)
    print(name)
    print("perplexity  bits per byte      tokens  text")
    for text in texts:
        with log_if_slow(f"evaluating on {text.name}: --tokens=N ends it after about N of them"):
            print(_result_line(programs, params, config, text, args.tokens), flush=True)
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
        "--kind",
        choices=_KINDS,
        help="format of the files; c4: a folder's c4-validation.*.json.gz (default: by a file's name, text where that "
        "says nothing; in a folder, the run's or text)",
    )
    parser.add_argument("--text_column", help="field or column of the text (default: the run's, else text)")
    parser.add_argument("--sequence_length", type=int, help="default: the run's; of a folder up to 2,048")
    parser.add_argument("--tokens", type=int, help="stop on each text after about this many (default: at its end)")
    return parser


def _config(model: GivenModel, args: argparse.Namespace) -> TrainConfig:
    """Return a run of one replica of the model, with batches of about `_TOKENS_OF_BATCH` tokens or as few as asked."""
    length = args.sequence_length or model.data.sequence_length
    tokens = min(_TOKENS_OF_BATCH, args.tokens or _TOKENS_OF_BATCH)
    data = dataclasses.replace(model.data, sequence_length=length, batch_size=max(1, round(tokens / length)))
    of_model = dataclasses.replace(model.config, remat="none")  # there is no backward pass
    groups = {"model": dataclasses.asdict(of_model), "data": dataclasses.asdict(data)}
    return from_dict({"method": "local", "num_replicas": 1, **groups})


def _validation(args: argparse.Namespace, model: GivenModel) -> list[_Text]:
    """Open a run's validation documents; warn if its data have changed."""
    if args.model is not None:
        raise UserError("what to evaluate on is missing: give --data=PATH")
    if args.kind or args.text_column:
        raise UserError("--kind and --text_column are of --data: give it, or leave them out")
    tokenizer, vocab_size, texts = model.found_tokenizer, model.config.vocab_size, []
    sources = configs_by_source(model.data)
    for group, data in sources.items():
        counted = None if tokenizer is None else _CountingTokenizer(tokenizer)
        documents = open_source(data, validation=True, seed=0, vocab_size=vocab_size, group=group)
        texts.append(_Text(f"validation of {group}", documents, counted))
    if not all(data.validation_path for data in sources.values()):
        now = RunData(model.data, seed=model.seed, vocab_size=vocab_size).facts(tokenizer)
        then = data_facts(args.workdir)
        changed = [name for name in then if then[name] != now.get(name)]
        if changed:
            tell(
                f"warning: the data are not those that the run last trained on ({changed[0]}: {then[changed[0]]!r} "
                f"then, {now.get(changed[0])!r} now): some of what is evaluated on may have been trained on"
            )
    return texts


def _given_texts(args: argparse.Namespace, model: GivenModel) -> list[_Text]:
    """Open the texts of --data; raise `UserError` for those that are missing or of another form."""
    texts = []
    for path in args.data:
        data = dataclasses.replace(model.data, path=path, kind=args.kind or _format_of(path, model.data))
        if args.text_column is not None:
            data = dataclasses.replace(data, text_column=args.text_column)
        counted = None if model.found_tokenizer is None else _CountingTokenizer(model.found_tokenizer)
        documents = open_documents(data, field="--data", vocab_size=model.config.vocab_size)
        if documents.num_columns == 1:
            model.tokenizer()  # raises where there is none
        documents.check_replicas(1)  # reads the first
        texts.append(_Text(path, documents, counted))
    return texts


def _format_of(path: str, data: DataConfig) -> str:
    """Return the format of a file by its name, and of a folder that of the model's training."""
    for kind, suffixes in SUFFIXES.items():
        if path.endswith(suffixes):
            return kind
    local = Path(path).expanduser()
    return data.kind if data.kind in _KINDS and not local.is_file() and (local.is_dir() or not local.suffix) else "text"


def _result_line(programs: Programs, params: Params, config: TrainConfig, text: _Text, tokens: int | None) -> str:
    """Evaluate a text, or about as many of its tokens; return its line of the table."""
    encode = encoder_of(config.data, text.counted, config.model.vocab_size)
    batches = batches_of(text.documents, encode, config.data)
    if tokens is not None:
        per_batch = config.data.batch_size * config.data.sequence_length
        batches = itertools.islice(batches, max(1, round(tokens / per_batch)))
    loss, scored = loss_of_one(programs, params, batches)
    bits = "unknown"
    if text.counted is not None and text.counted.num_bytes:
        # Where it ends early, more has been encoded than was scored.
        share = 1.0 if tokens is None else min(1.0, scored / text.counted.num_labels(config.data))
        bits = f"{loss / math.log(2) / (share * text.counted.num_bytes):.4f}"
    return f"{format_perplexity(perplexity_of(loss / scored)):>10}  {bits:>13}  {scored:>10,}  {text.name}"


def _to_device(programs: Programs, params: Params) -> Params:
    """Put one model's weights on the device as those of a run of one replica."""
    return jax.tree.map(lambda x, place: jax.device_put(x[None], place.sharding), params, programs.state.params)
