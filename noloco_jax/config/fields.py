"""A run's configuration: frozen dataclasses, each field with its default, its meaning and the values that it takes.

The meanings are also the text of `configs/FIELDS.md`, which `reference.py` makes. `changes.py` says which must match at
a resume.

Names and meanings are part of the public interface: `--config.outer.sync_every=25` sets `TrainConfig.outer.sync_every`.
"""

from dataclasses import MISSING, dataclass, replace

from noloco_jax.config.schema import NO_ENTRIES, Entries, setting
from noloco_jax.optim.methods import METHODS
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.optim.wire_sizes import WIRES


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies; the names are those of a Hugging Face config.json."""

    factor: float = setting(MISSING, "Divisor of the low frequencies.", above=0)
    low_freq_factor: float = setting(
        MISSING, "Turns in the original context, below which factor applies whole.", above=0
    )
    high_freq_factor: float = setting(MISSING, "Turns in the original context, above which nothing is scaled.", above=0)
    original_max_position_embeddings: int = setting(MISSING, "Context length in tokens before the scaling.", minimum=1)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and precision of the model that every replica trains."""

    kind: str = setting(
        "llama", "llama, moe (mixture of experts) or a class: my_package.my_module:MyModel.", nonempty=True
    )
    hidden_size: int = setting(256, "Width of the residual stream.", minimum=1)
    intermediate_size: int = setting(1024, "Width of the feed-forward layers, in moe of one expert.", minimum=1)
    num_layers: int = setting(4, "Transformer layers.", minimum=1)
    num_heads: int = setting(4, "Attention heads per layer.", minimum=1)
    num_kv_heads: int = setting(4, "Key and value heads per layer.", minimum=1)
    head_dim: int | None = setting(None, "Width of a head; None: hidden_size / num_heads.", minimum=2)
    qkv_bias: bool = setting(False, "Add biases to queries, keys and values, as Qwen 2.")
    qk_norm: bool = setting(False, "Normalize each head's queries and keys, as Qwen 3.")
    sliding_window: int | None = setting(None, "Tokens attended to, itself among them; None: all.", minimum=1)
    num_experts: int = setting(8, "Experts per layer (moe).", minimum=1)
    experts_per_token: int = setting(2, "Experts per token (moe).", minimum=1)
    norm_topk_prob: bool = setting(True, "Scale a token's expert weights to a sum of one (moe).")
    router_aux_loss_coef: float = setting(0.01, "Factor of the load-balancing loss in training (moe).", minimum=0)
    vocab_size: int = setting(259, "Number of token ids.", minimum=1)
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", above=0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = setting(1e-5, "Added to RMSNorm's mean square.", above=0)
    tie_embeddings: bool = setting(False, "Use the token embedding as the output layer too.")
    dtype: str = setting("float32", "Dtype of activations and matrix products.", choices=("float32", "bfloat16"))
    param_dtype: str = setting("float32", "Dtype of the weights.", choices=("float32", "bfloat16"))
    remat: str = setting(
        "none",
        "Recomputed in the backward pass: nothing, whole layers, all but matrix products, whole stages.",
        choices=("none", "full", "dots", "stage"),
    )

    @property
    def is_built_in(self) -> bool:
        """True for a model of this package, False for a class of one's own."""
        return self.kind in ("llama", "moe")

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True)
class InnerConfig:
    """Inner optimizer of a replica, and its learning rate: a linear warmup, then `schedule`."""

    optimizer: str = setting(
        "adam",
        "Optimizer; muon leaves embedding, head and norms to AdamW.",
        choices=("adam", "adamw", "muon"),
    )
    lr: float = setting(6e-4, "Learning rate after the warmup.", above=0)
    adam_lr: float | None = setting(None, "AdamW's learning rate beside muon; None: a tenth of inner.lr.", above=0)
    min_lr: float = setting(6e-5, "Learning rate at the end, unless constant.", minimum=0)
    warmup_steps: int = setting(
        20, "Inner steps of the linear warmup; one longer than the run becomes a tenth of it.", minimum=0
    )
    schedule: str = setting(
        "cosine",
        "Learning rate after the warmup: cosine decay to min_lr; level, then linear decay over the last fifth of the "
        "run (wsd); constant.",
        choices=("cosine", "wsd", "constant"),
    )
    clip_norm: float = setting(1.0, "Largest norm of a replica's gradient; 0: no clipping.", minimum=0)
    b1: float = setting(0.9, "Adam's decay rate of the first moment.", minimum=0, below=1)
    b2: float = setting(0.999, "Adam's decay rate of the second moment.", minimum=0, below=1)
    eps: float = setting(1e-8, "Added to the root of Adam's second moment.", above=0)
    momentum: float = setting(0.95, "Muon's decay rate of its momentum.", minimum=0, below=1)
    momentum_share: float | None = setting(
        None,
        "Share of momentum in Muon's direction, beside the step's gradient (quasi-hyperbolic); None: inner.momentum, "
        "which is Nesterov's.",
        minimum=0,
        below=1,
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay of all weights, times the learning rate (adamw, muon).", minimum=0
    )


@dataclass(frozen=True)
class OuterConfig:
    """Outer step between replicas, every `sync_every` inner steps; `ddp` and `local` have none.

    Methods have [defaults of their own](#defaults-by-method) for some fields, which a `TrainConfig` fills in; those of
    other methods stay None. Where a flag names another method than the file's, the file's values of these fields are
    dropped.
    """

    lr: float = setting(None, "Outer learning rate, the paper's beta.", above=0)
    momentum: float = setting(None, "Outer momentum, the paper's alpha.", minimum=0, below=1)
    momentum_of: str = setting(
        None,
        "Quantity that momentum accumulates: outer steps, as in the paper, or peers' corrections, which keep the "
        "replicas' mean (noloco).",
        choices=("steps", "corrections"),
    )
    consensus: float | None = setting(
        None, "Pull towards the group's mean, the paper's gamma; None: outer.lr (noloco).", minimum=0
    )
    sync_every: int = setting(None, "Inner steps between outer steps.", minimum=1)
    group_size: int = setting(
        None, "Replicas that average together; 4 or 8 by halves, in 1.5 or 1.75 messages (noloco).", minimum=1
    )
    order: str = setting(
        None,
        "Pairings in shuffled passes, independent draws, as in the paper, or a hypercube: log2(num_replicas) rounds "
        "of pairs, half as many of fours, average all (powers of two; noloco).",
        choices=("passes", "independent", "hypercube"),
    )
    nesterov: bool = setting(None, "Nesterov momentum; False: heavy ball (diloco).")
    wire: str = setting(
        None,
        "Format of messages; int and modulo quantize blocks of weights (noloco, diloco, epidemic; modulo4: noloco\\*).",
        choices=WIRES,
    )
    fragments: int = setting(
        1, "Equal parts of the weights with outer steps of their own; a divisor of model.hidden_size.", minimum=1
    )
    delay: int = setting(
        0, "Inner steps until peers' contributions are applied, while training goes on; at most sync_every.", minimum=0
    )
    final_merge: bool = setting(False, "Give all replicas their mean at the end.")
    neighbours: int | None = setting(
        None, "Peers to send to in an outer step; None: log2 of num_replicas, rounded up (epidemic).", minimum=1
    )
    top_k: int = setting(None, "Entries sent of 4096, in multiples of 4 (sparseloco).", minimum=1, below=4097)
    offload: bool = setting(False, "Keep slow weights and outer momentum in host memory between outer steps.")


DATA_KINDS = ("jsonl", "parquet", "text")
_TEXT_COLUMN = "text"


@dataclass(frozen=True)
class SourceConfig:
    """A source of `data.mixture`, under any NAME; its fields are those of `data`. By default there is none."""

    kind: str = setting(MISSING, "Same as data.kind.", choices=DATA_KINDS)
    weight: float = setting(MISSING, "Share of the tokens, relative to the other sources.", above=0)
    path: str = setting("", "Same as data.path.")
    validation_path: str = setting("", "Same as data.validation_path.")
    text_column: str = setting(_TEXT_COLUMN, "Same as data.text_column.", nonempty=True)


@dataclass(frozen=True)
class DataConfig:
    """Documents of a run, and their tokenizing, shuffling and batching."""

    kind: str = setting(
        "text",
        "Files: JSON lines such as C4's, Parquet, text; mixture: those of data.mixture.",
        choices=(*DATA_KINDS, "mixture"),
    )
    path: str = setting("", "Training file or folder, or its address (hf://, s3://, gs://, https://).")
    validation_path: str = setting(
        "",
        "Validation file, folder or address; empty: found beside data.path or held out of it, as at every resume.",
    )
    text_column: str = setting(
        _TEXT_COLUMN,
        "JSON field or Parquet column of the text; other names than text come before tokens.",
        nonempty=True,
    )
    tokenizer: str = setting("byte", "byte, or a Hugging Face tokenizer's name, folder or address.", nonempty=True)
    add_bos: bool = setting(True, "Begin documents with BOS.")
    add_eos: bool = setting(True, "End documents with EOS.")
    sequence_length: int = setting(
        256, "Tokens per sequence; of text it must cut the same pieces at a resume.", minimum=1
    )
    batch_size: int = setting(8, "Sequences per replica and inner step.", minimum=1)
    document_mask: bool = setting(False, "Attend within a document alone; its first token is then no label.")
    num_workers: int = setting(0, "Tokenizing processes per process of the run; 0: threads.", minimum=0)
    shuffle_buffer: int = setting(1000, "Documents of a shuffle window, of text all; 1: the files' order.", minimum=1)
    mixture: Entries[SourceConfig] = NO_ENTRIES


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; of one that is -1, all that the others leave. Routing between stages."""

    replica: int = setting(-1, "Devices to divide the replicas among.", minimum=1, besides=-1)
    stage: int = setting(1, "Pipeline stages per replica.", minimum=1)
    fsdp: int = setting(1, "Devices that shard a replica's weights and batch.", minimum=1, besides=-1)
    tensor: int = setting(1, "Devices that shard each layer's matrix products.", minimum=1, besides=-1)
    routing: str = setting(
        "random", "Replica whose next stage a micro-batch enters; fixed: its own.", choices=("random", "fixed")
    )


@dataclass(frozen=True)
class TrainConfig:
    """A run: its method, length, evaluation, logging and checkpoints."""

    method: str = setting(
        "noloco",
        "Averaging: of small groups, of all, of random peers, of all's largest changes, of gradients, none.",
        choices=tuple(METHODS),
    )
    num_replicas: int = setting(4, "Number of replicas.", minimum=1, below=2**14)
    num_steps: int = setting(1000, "Inner steps of the run.", minimum=1)
    seed: int = setting(0, "Seed of initial weights, data order and pairings.", minimum=0, below=2**64)
    num_microbatches: int = setting(1, "Parts of a replica's batch, computed in turn.", minimum=1)
    model: ModelConfig = ModelConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    eval_every: int = setting(500, "Inner steps between evaluations; 0: only at the end.", minimum=0)
    eval_batches: int = setting(16, "Validation batches per evaluation.", minimum=1)
    log_every: int = setting(10, "Inner steps between lines of metrics.", minimum=1)
    checkpoint_every: int = setting(500, "Inner steps between checkpoints; the end has one too.", minimum=1)
    keep_checkpoints: int = setting(2, "Newest checkpoints to keep.", minimum=1)
    keep_period: int = setting(
        0, "Inner steps between permanent checkpoints, a multiple of checkpoint_every; 0: none.", minimum=0
    )
    elastic: str = setting(
        "",
        "Resume with another num_replicas: merge, for fewer; copy, for more; empty: refuse.",
        choices=("", "merge", "copy"),
    )
    init_from: str = setting("", "Hugging Face folder or address of initial weights; empty: random, or a resume.")
    sample_prompt: str = setting("", "Prompt that the merged model continues at the end.")
    sample_tokens: int = setting(0, "Tokens to generate after sample_prompt.", minimum=0)
    log_replicas: bool = setting(False, "Log each replica's training loss.")

    def __post_init__(self) -> None:
        """Fill the method's own fields that are not given from its defaults."""
        defaults = METHODS[self.method].defaults if self.method in METHODS else {}
        own = {name: value for name, value in defaults.items() if getattr(self.outer, name) is None}
        object.__setattr__(self, "outer", replace(self.outer, **own))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together train on in an inner step."""
        return self.num_replicas * self.data.batch_size * self.data.sequence_length

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a replica's micro-batch."""
        return self.data.batch_size // self.num_microbatches * self.data.sequence_length

    @property
    def schedule(self) -> SyncSchedule | None:
        """Schedule of the outer steps; None for methods without."""
        if not METHODS[self.method].has_outer_steps:
            return None
        return SyncSchedule(self.outer.sync_every, self.outer.fragments, self.outer.delay)

    @property
    def delay(self) -> int:
        """Inner steps from an outer step to its correction; 0 for methods without outer steps."""
        return self.outer.delay if METHODS[self.method].has_outer_steps else 0
