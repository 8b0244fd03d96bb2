"""Prompts tokenized as in training, and the text sample at the end of a run."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import TrainConfig
from noloco_jax.data import Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.model.decode import generate
from noloco_jax.optim import prng
from noloco_jax.spmd.programs import Programs
from noloco_jax.spmd.stages import resize_vocabulary

PyTree = Any


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, add_bos: bool) -> list[int]:
    """Tokenize a prompt, after a BOS token if `add_bos` and the tokenizer has one; the result may be empty."""
    begin = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    return [*begin, *(int(i) for i in tokenizer.encode(prompt))]


def sample_prompt(config: TrainConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt tokens of the text sample.

    Raises:
      UserError: if there are none.
    """
    prompt = prompt_ids(tokenizer, config.sample_prompt, add_bos=config.data.add_bos)
    if not prompt:
        raise UserError(
            f"sample_tokens={config.sample_tokens} and sample_prompt={config.sample_prompt!r} has no tokens, and no "
            "BOS precedes it: give a prompt, or sample_tokens=0"
        )
    return prompt


def sample_of_run(config: TrainConfig, tokenizer: Tokenizer | None, programs: Programs, params: PyTree) -> str | None:
    """Return the text sample of the merged model on the first process; the others contribute their parts of it.

    For an island the model is its one replica.

    Args:
      config: the run.
      tokenizer: its tokenizer; None: no sample.
      programs: its programs.
      params: fast weights, the replicas in front.
    """
    if tokenizer is None or not config.sample_tokens:
        return None
    everywhere = NamedSharding(programs.mesh, P())
    first = jax.jit(
        lambda params: resize_vocabulary(config.model, jax.tree.map(lambda x: x[0], params), config.model.vocab_size),
        out_shardings=everywhere,
    )
    merged = params if config.num_replicas == 1 else programs.merge(params)
    merged = jax.tree.map(lambda x: x.addressable_data(0), first(merged))
    if jax.process_index() > 0:
        return None
    ids = generate(
        config.model,
        merged,
        np.asarray([sample_prompt(config, tokenizer)], np.int32),
        max_new_tokens=config.sample_tokens,
        temperature=0.7,
        key=prng.key(config.seed),
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode([int(i) for i in np.asarray(ids)[0]])
