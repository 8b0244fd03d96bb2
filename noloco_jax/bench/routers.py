"""Print how evenly the routers of a trained mixture of experts share out tokens, and whether its replicas agree.

    python -m noloco_jax.bench.routers --workdir=DIR

reads the run's newest checkpoint and its validation sequences, of which every replica gets the same. Load is the
tokens of the busiest expert over the mean, 1 if even. Agreement is the share of a token's experts that two replicas
have in common, in the mean over tokens and pairs of replicas; unrelated routers have experts_per_token / num_experts.

Axes: R replicas, L layers, B sequences, T positions, A experts of a token, E experts.
"""

from collections.abc import Sequence
from itertools import combinations

import jax
import numpy as np

from noloco_jax.checkpoint.trained_model import load_for_export
from noloco_jax.config import load_saved, make_parser
from noloco_jax.data import load_tokenizer, validation_batches
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.files import folder_of_flag
from noloco_jax.model.moe import Moe


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print one line for every layer."""
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.bench.routers")
    parser.add_argument("--workdir", required=True, type=folder_of_flag, help="a run's folder, with a checkpoint in it")
    args = parser.parse_args(argv)
    config = load_saved(args.workdir)
    if config.model.kind != "moe":
        raise UserError(f"{args.workdir} is a run of model.kind={config.model.kind!r}, which has no routers")
    tokenizer = load_tokenizer(config.data.tokenizer)
    batches = validation_batches(
        config.data, tokenizer, num_batches=config.eval_batches, vocab_size=config.model.vocab_size
    )
    ids_BT = np.concatenate([batch["input_ids"] for batch in batches])
    choices = jax.jit(lambda params: Moe.from_params(config.model, params).choices(ids_BT))
    replicas = [load_for_export(args.workdir, number).params for number in range(config.num_replicas)]
    experts_RLBTA = np.stack([choices(params) for params in replicas])
    load_L, agreement_L = loads(experts_RLBTA, config.model.num_experts), agreements(experts_RLBTA)
    for layer, (load, agreement) in enumerate(zip(load_L, agreement_L, strict=True)):
        print(f"layer {layer}: load {load:.2f}, agreement {100 * agreement:.1f} %")
    return 0


def loads(experts_RLBTA: np.ndarray, num_experts: int) -> np.ndarray:
    """Return each layer's largest over mean number of tokens of an expert, in the mean over replicas, (L,)."""
    num_replicas, num_layers = experts_RLBTA.shape[:2]
    rows = experts_RLBTA.reshape(num_replicas * num_layers, -1)
    tokens = np.stack([np.bincount(row, minlength=num_experts) for row in rows])
    return (tokens.max(axis=1) / tokens.mean(axis=1)).reshape(num_replicas, num_layers).mean(axis=0)


def agreements(experts_RLBTA: np.ndarray) -> np.ndarray:
    """Return each layer's share of experts that pairs of replicas have in common, (L,); NaN for one replica."""
    shares = [
        (one[..., None] == other[..., None, :]).any(axis=-1).mean(axis=(1, 2, 3))
        for one, other in combinations(experts_RLBTA, 2)
    ]
    return np.mean(shares, axis=0) if shares else np.full(experts_RLBTA.shape[1], np.nan)


if __name__ == "__main__":
    main_with_errors(main)
