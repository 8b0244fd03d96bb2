"""What the paper's runs have in common (arXiv 2506.10911); the files c4_*.py and reddit_*.py choose size and data.

They take an argument after a colon: a method, and optionally replicas and pipeline stages, as in
`--config=configs/c4_1b.py:noloco,replicas=16,stages=2`. The global batch is the paper's however many replicas share it,
also where `--config.num_replicas` says how many; numbers that do not divide it are refused. `:diloco` is the paper's
baseline; `--config.method=diloco` in its place leaves out what is here for noloco's outer step, and takes DiLoCo's own
defaults.

`best` in place of a method is NoLoCo with all that we have found to bring it closer to data parallel training at a
66th of the bytes; configs/README.md has the figures, which are of small models. From 16 replicas on it averages groups
of 4; `best,groups=2` keeps pairs, which islands need. Give its number of replicas as `best,replicas=16`: the outer step
does not follow `--config.num_replicas`.
"""

from ml_collections import ConfigDict

import noloco_jax

SEQUENCE_LENGTH = 1024

# Of each size: hidden size, layers, heads, FFN, learning rate, sequences in the global batch, replicas, remat.
# The batches are 0.5M, 1M and 2M tokens. 12 heads are the authors' files'; the paper's text says 16.
SIZES = {
    "125m": (768, 12, 12, 3072, 6e-4, 512, 8, "none"),
    "1b": (2048, 24, 32, 8192, 2e-4, 1024, 8, "full"),
    "7b": (4096, 32, 32, 16384, 1.2e-4, 2048, 16, "full"),
}

# Of each method: the outer learning rate and momentum, and the inner steps between two outer steps.
OUTER = {"noloco": (0.7, 0.5, 50), "diloco": (0.7, 0.3, 100)}
METHODS = (*OUTER, "ddp", "local", "best")


class GlobalBatch(int):
    """Sequences of a step, which replicas share equally."""

    def __floordiv__(self, replicas):
        """Return a replica's share; the reference to `num_replicas` calls this once that is known."""
        if isinstance(replicas, int) and self % replicas:
            raise ValueError(
                f"num_replicas={replicas} does not divide the {self} sequences of a step: give a divisor, or "
                "set data.batch_size"
            )
        return super().__floordiv__(replicas)


def outer_config(method: str) -> ConfigDict:
    """The `outer` fields of a method, none for those that take no outer steps."""
    config = ConfigDict()
    if method in OUTER:
        config.lr, config.momentum, config.sync_every = OUTER[method]
    if method == "noloco":
        config.group_size = 2
        config.order = "independent"  # a pairing a round, whatever was drawn before
    if method == "diloco":
        config.nesterov = False  # the paper's baseline is heavy ball; DiLoCo's own defaults are Nesterov 0.7, 0.9
    return config


def use_method(config, inner, method: str, replicas: int, groups: int = 0) -> None:
    """Sets what a method, or `best`, asks of a configuration whose `inner` has the fields for Adam."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    if groups and method != "best":
        raise ValueError(f"groups={groups} goes with best: give --config.outer.group_size={groups}")
    config.method = "noloco" if method == "best" else method
    config.outer.update(best_outer_config(replicas, groups) if method == "best" else outer_config(method))
    if method == "best":
        inner.optimizer = "muon"
        inner.momentum_share = 0.7
        inner.adam_lr = inner.lr  # of embedding, head and norms, as before
        inner.lr = 0.02
        inner.min_lr = inner.get_oneway_ref("lr") / 10


def best_outer_config(replicas: int, groups: int = 0) -> ConfigDict:
    """Few bits often: steps of eighths, in windows, longer than the mean of a group's movements.

    From 16 replicas on, groups of 4 average; they take 1.5 messages, so they average every 8 steps instead of 5.
    `groups` gives another size, such as the 2 of islands.
    """
    fours = groups == 4 or (groups == 0 and replicas >= 16 and replicas % 4 == 0)
    powers = not replicas & (replicas - 1)
    return ConfigDict(
        {
            "lr": 2.0 if fours else 1.5,
            "consensus": 1.0,
            "momentum": 0.3,
            "sync_every": 8 if fours else 5,
            "group_size": 4 if fours else groups or 2,
            "fragments": 8,
            "wire": "modulo4",
            "order": "hypercube" if powers and not groups & (groups - 1) else "passes",
        }
    )


def paper_config(argument: str, size: str, data: str) -> ConfigDict:
    """The configuration of one size ("125m", "1b", "7b") on one data set ("c4", "reddit")."""
    hidden, layers, heads, ffn, lr, global_batch, replicas, remat = SIZES[size]
    method, options = _parse(argument, {"replicas": replicas, "stages": 1, "groups": 0})

    config = noloco_jax.default_config()
    config.num_replicas = replicas
    config.num_steps = 25_000
    config.eval_every = 1000
    config.checkpoint_every = 1000

    config.model.hidden_size = hidden
    config.model.intermediate_size = ffn
    config.model.num_layers = layers
    config.model.num_heads = heads
    config.model.num_kv_heads = heads
    config.model.vocab_size = 128_002  # Llama 3's 128,000 words, <|begin_of_text|> and <|end_of_text|>
    config.model.dtype = "bfloat16"
    config.model.param_dtype = "float32"
    config.model.remat = remat

    inner = config.inner
    inner.lr = lr
    inner.min_lr = inner.get_oneway_ref("lr") / 10
    inner.warmup_steps = 1000
    inner.clip_norm = 1.0
    inner.weight_decay = 0.0

    use_method(config, inner, method, options["replicas"], options["groups"])

    config.data.kind = {"c4": "jsonl", "reddit": "parquet"}[data]
    config.data.tokenizer = "meta-llama/Meta-Llama-3-8B"
    config.data.sequence_length = SEQUENCE_LENGTH
    config.data.batch_size = GlobalBatch(global_batch) // config.get_oneway_ref("num_replicas")

    config.num_replicas = options["replicas"]  # after the share of the batch, which a flag may still set

    if options["stages"] > 1:
        config.mesh.stage = options["stages"]
        config.num_microbatches = 16  # with 4 stages the pipeline idles for 3 of 19 ticks
    return config


def _parse(argument: str, options: dict[str, int]) -> tuple[str, dict[str, int]]:
    """("noloco", {"replicas": 16, "stages": 1}) of "noloco,replicas=16" and the options' defaults."""
    method, *rest = argument.split(",")
    for text in rest:
        name, _, value = text.partition("=")
        if name not in options or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{text!r} is none of {', '.join(f'{option}=NUMBER' for option in options)}")
        options = options | {name: int(value)}
    return method, options
