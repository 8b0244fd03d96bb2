"""A run's configuration: frozen dataclasses, each field with its default, its meaning and the values that it takes.

The meanings are also the text of `configs/FIELDS.md`, which `reference.py` makes. `changes.py` says which must match at
a resume.

Names and meanings are part of the public interface: `--config.outer.sync_every=25` sets `TrainConfig.outer.sync_every`.
"""

from dataclasses import MISSING, dataclass, replace

from noloco_jax.config.schema import NO_ENTRIES, Entries, setting
from noloco_jax.methods import METHODS
from noloco_jax.wires import WIRES


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies; the names are those of a Hugging Face config.json."""

    factor: float = setting(MISSING, "Divisor of the low frequencies.", above=0)
    low_freq_factor: float = setting(
        MISSING, "Turns in the original context; a frequency with fewer is divided by the whole factor.", above=0
    )
    high_freq_factor: float = setting(
        MISSING, "Turns in the original context; a frequency with more is not scaled.", above=0
    )
    original_max_position_embeddings: int = setting(MISSING, "Context length in tokens before the scaling.", minimum=1)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and precision of the model that every replica trains."""

    kind: str = setting(
        "llama",
        "The model: llama, moe (a mixture of experts) or a class of one's own as my_package.my_module:MyModel.",
        nonempty=True,
    )
    hidden_size: int = setting(256, "Width of the residual stream.", minimum=1)
    intermediate_size: int = setting(1024, "Width of the feed-forward layers, in moe of one expert.", minimum=1)
    num_layers: int = setting(4, "Number of transformer layers.", minimum=1)
    num_heads: int = setting(4, "Attention heads per layer.", minimum=1)
    num_kv_heads: int = setting(4, "Key and value heads per layer, shared by the attention heads.", minimum=1)
    head_dim: int | None = setting(None, "Width of a head; None: hidden_size over num_heads.", minimum=2)
    qkv_bias: bool = setting(False, "Add learned biases to queries, keys and values, as Qwen 2 does.")
    qk_norm: bool = setting(False, "Normalize the queries and keys of each head by RMSNorm, as Qwen 3 does.")
    sliding_window: int | None = setting(
        None,
        "Last tokens, itself among them, to which a token attends in every layer, as in Mistral; None: all.",
        minimum=1,
    )
    num_experts: int = setting(8, "Experts of each layer (moe only).", minimum=1)
    experts_per_token: int = setting(2, "Experts that a layer's router sends a token to (moe only).", minimum=1)
    norm_topk_prob: bool = setting(True, "Scale the weights of a token's experts to a sum of one (moe only).")
    router_aux_loss_coef: float = setting(
        0.01, "Factor of the load-balancing loss, which training adds to the token loss (moe only).", minimum=0
    )
    vocab_size: int = setting(259, "Number of token ids; the byte tokenizer has 259.", minimum=1)
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", above=0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = setting(1e-5, "Number added to the mean square in RMSNorm.", above=0)
    tie_embeddings: bool = setting(False, "Use the token embedding's matrix as the output layer too.")
    dtype: str = setting("float32", "Dtype of activations and matrix products.", choices=("float32", "bfloat16"))
    param_dtype: str = setting(
        "float32", "Dtype of the weights that the inner optimizer updates.", choices=("float32", "bfloat16")
    )
    remat: str = setting(
        "none",
        "Rematerialization in the backward pass: none, full layers, all but matrix products (dots), or whole "
        "pipeline stages (stage).",
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
        "Inner optimizer; muon updates the layers' matrices by Muon, and embedding, head and norms by AdamW.",
        choices=("adam", "adamw", "muon"),
    )
    lr: float = setting(6e-4, "Learning rate after the warmup.", above=0)
    adam_lr: float | None = setting(
        None,
        "Learning rate of the weights that AdamW updates beside muon, on the same schedule; None: a tenth of inner.lr.",
        above=0,
    )
    min_lr: float = setting(6e-5, "Learning rate at the end of the run, unless the schedule is constant.", minimum=0)
    warmup_steps: int = setting(20, "Inner steps of the linear warmup to inner.lr.", minimum=0)
    schedule: str = setting(
        "cosine",
        "Learning rate after the warmup: a cosine decay to min_lr, constant and then a linear decay to min_lr (wsd), "
        "or constant.",
        choices=("cosine", "wsd", "constant"),
    )
    decay_share: float = setting(0.2, "Share of num_steps over which wsd decays the learning rate.", above=0, below=1)
    clip_norm: float = setting(
        1.0, "Gradient clipping: largest global norm of a replica's gradient; 0: no clipping.", minimum=0
    )
    b1: float = setting(0.9, "Adam's decay rate per step of the first moment.", minimum=0, below=1)
    b2: float = setting(0.999, "Adam's decay rate per step of the second moment.", minimum=0, below=1)
    eps: float = setting(1e-8, "Number added to the square root of Adam's second moment.", above=0)
    momentum: float = setting(0.95, "Muon's decay rate per step of its momentum.", minimum=0, below=1)
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay of all weights, norms and embedding too, multiplied by the learning rate (adamw and "
        "muon only).",
        minimum=0,
    )


@dataclass(frozen=True)
class OuterConfig:
    """Outer step between replicas, every `sync_every` inner steps; `ddp` and `local` have none.

    Each method has its own defaults for some of these fields, in its row in `methods.py`. A `TrainConfig` fills in
    those that its method uses; the others stay None. A config file's values of these fields are for the file's method:
    where a flag names another method, that method's defaults hold, except for fields that flags set too.
    """

    lr: float = setting(None, "Outer learning rate, the paper's beta.", above=0)
    momentum: float = setting(None, "Outer momentum, the paper's alpha.", minimum=0, below=1)
    momentum_of: str = setting(
        None,
        "Quantity that outer momentum accumulates: steps (whole outer steps, as in the paper) or corrections (what "
        "peers contributed, which leaves the replicas' mean unchanged; noloco only).",
        choices=("steps", "corrections"),
    )
    consensus: float | None = setting(
        None,
        "Strength of the pull towards the group's mean, the paper's gamma; None: equal to outer.lr (noloco only).",
        minimum=0,
    )
    sync_every: int = setting(None, "Inner steps from one outer step to the next.", minimum=1)
    group_size: int = setting(None, "Replicas per group that averages in an outer step (noloco only).", minimum=1)
    order: str = setting(
        None,
        "Order of pairings: shuffled passes over their pool, independent draws, as in the paper, or a hypercube, where "
        "any log2(num_replicas) rounds in a row average all replicas (powers of two; noloco only).",
        choices=("passes", "independent", "hypercube"),
    )
    nesterov: bool = setting(None, "Use Nesterov momentum, as in DiLoCo's own paper; False: heavy ball (diloco only).")
    wire: str = setting(
        None,
        "Wire format of messages between replicas; the int and modulo formats quantize blocks of weights (noloco and "
        "epidemic; modulo: noloco only, and it must match).",
        choices=WIRES,
    )
    state_dtype: str = setting("float32", "Dtype of slow weights and outer momentum.", choices=("float32", "bfloat16"))
    fragments: int = setting(
        1,
        "Equal parts of the parameters, each with an outer step of its own in every sync_every inner steps; a divisor "
        "of model.hidden_size.",
        minimum=1,
    )
    delay: int = setting(
        0,
        "Inner steps from an outer step until the peers' contribution is applied; exchange and training overlap, over "
        "the hosts where replicas are on several devices; at most sync_every.",
        minimum=0,
    )
    final_merge: bool = setting(False, "Replace the weights of all replicas by their mean at the end.")
    neighbours: int | None = setting(
        None,
        "Peers to which a replica sends its weights in an outer step, and as many from which it receives; None: log2 "
        "of num_replicas, rounded up (epidemic only).",
        minimum=1,
    )
    error_decay: float = setting(
        None,
        "Decay per outer step of the error feedback, the movement not sent yet; SparseLoCo's beta (sparseloco only).",
        minimum=0,
        below=1,
    )
    top_k: int = setting(
        None,
        "Entries sent per chunk of 4096 weights, rounded up to a multiple of 4 (sparseloco only).",
        minimum=1,
        below=4097,
    )
    offload: bool = setting(False, "Keep slow weights and outer momentum in host memory between outer steps.")


DATA_KINDS = ("c4", "jsonl", "parquet", "text")
_TEXT_COLUMN = "text"


@dataclass(frozen=True)
class SourceConfig:
    """A source of `data.mixture`, under any NAME; by default there is none.

    The fields have the meaning of those of `data`.
    """

    kind: str = setting(MISSING, "Format of the files under its path, as for data.kind.", choices=DATA_KINDS)
    weight: float = setting(
        MISSING, "Share of the training and validation tokens, relative to the weights of the other sources.", above=0
    )
    path: str = setting("", "File or folder of the source's training documents.")
    validation_path: str = setting(
        "",
        "File or folder of the source's validation documents; empty: those found beside its path or held out of it, "
        "which a resume of a run that held out its own requires.",
    )
    text_column: str = setting(
        _TEXT_COLUMN, "The field of a JSON line or the Parquet column that holds the source's text.", nonempty=True
    )


@dataclass(frozen=True)
class DataConfig:
    """Documents of a run, and their tokenizing, shuffling and batching."""

    kind: str = setting(
        "text",
        "Format of the files under data.path: C4's gzipped JSON lines, JSON lines under any name, Parquet files, or "
        "text files; mixture: the sources are in data.mixture.",
        choices=(*DATA_KINDS, "mixture"),
    )
    path: str = setting(
        "", "File or folder of the training documents; or its address, hf://, s3://, gs:// or https://."
    )
    validation_path: str = setting(
        "",
        "File, folder or address of the validation documents; empty: those found beside data.path or held out of it, "
        "which a resume of a run that held out its own requires.",
    )
    text_column: str = setting(
        _TEXT_COLUMN,
        "The field of a JSON line or the Parquet column that holds a document's text; a name other than text takes "
        "precedence over columns of tokens.",
        nonempty=True,
    )
    tokenizer: str = setting(
        "byte",
        "'byte' (a token per byte), or the name or folder of a transformers tokenizer, or the folder's address.",
        nonempty=True,
    )
    add_bos: bool = setting(True, "Begin each document with the tokenizer's BOS token.")
    add_eos: bool = setting(True, "End each document with the tokenizer's EOS token.")
    sequence_length: int = setting(
        256,
        "Tokens per sequence; a run on text resumes only with one that cuts its files into the same pieces.",
        minimum=1,
    )
    batch_size: int = setting(8, "Sequences per replica and inner step.", minimum=1)
    document_mask: bool = setting(
        False, "Restrict attention to a token's own document; a document's first token is then no label."
    )
    num_workers: int = setting(
        0,
        "Processes that tokenize for all replicas that a process of the run reads; 0: a thread each does it.",
        minimum=0,
    )
    shuffle_buffer: int = setting(
        1000, "Documents of a shuffle window, of text all; 1 keeps the files' order.", minimum=1
    )
    on_bad_shard: str = setting(
        "stop",
        "Action at a file that does not decode: stop the run, or skip the rest of the file with a warning.",
        choices=("stop", "skip"),
    )
    mixture: Entries[SourceConfig] = NO_ENTRIES


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh, and the routing of micro-batches through it."""

    replica: int = setting(
        -1, "Devices that the replicas are divided among; -1: all that the other axes leave.", minimum=1, besides=-1
    )
    stage: int = setting(1, "Pipeline stages per replica.", minimum=1)
    fsdp: int = setting(
        1,
        "Devices that shard a replica's weights and its batch; -1: all that the other axes leave.",
        minimum=1,
        besides=-1,
    )
    tensor: int = setting(
        1, "Devices that shard every layer's matrix products; -1: all that the other axes leave.", minimum=1, besides=-1
    )
    routing: str = setting(
        "random",
        "Replica whose next stage a micro-batch enters: a random one, or always its own (fixed).",
        choices=("random", "fixed"),
    )


@dataclass(frozen=True)
class TrainConfig:
    """A run: its method, length, evaluation, logging and checkpoints."""

    method: str = setting(
        "noloco",
        "Method of averaging: small groups, random peers, all replicas, gradients at every step, or none (local).",
        choices=tuple(METHODS),
    )
    num_replicas: int = setting(4, "Number of replicas.", minimum=1, below=2**14)
    num_steps: int = setting(1000, "Inner steps of the run.", minimum=1)
    seed: int = setting(0, "Seed of initial weights, data order and pairings.", minimum=0, below=2**64)
    num_microbatches: int = setting(1, "Micro-batches of a replica's batch, computed one after another.", minimum=1)
    model: ModelConfig = ModelConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    eval_every: int = setting(
        500,
        "Inner steps from one evaluation to the next; the run always ends with one, and 0 leaves out all others.",
        minimum=0,
    )
    eval_batches: int = setting(16, "Validation batches per evaluation.", minimum=1)
    log_every: int = setting(10, "Inner steps from one line of training metrics to the next.", minimum=1)
    checkpoint_every: int = setting(
        500, "Inner steps from one checkpoint to the next; the run always ends with one.", minimum=1
    )
    keep_checkpoints: int = setting(2, "Number of newest checkpoints to keep.", minimum=1)
    keep_period: int = setting(
        0,
        "Inner steps from one permanent checkpoint to the next, a multiple of checkpoint_every; 0: none is permanent.",
        minimum=0,
    )
    elastic: str = setting(
        "",
        "Resume with another num_replicas: merge several replicas into one or keep only some, for fewer; copy "
        "replicas, for more; empty: refuse.",
        choices=("", "merge", "keep", "copy"),
    )
    init_from: str = setting(
        "",
        "Hugging Face folder of the initial weights, or its address; empty: random weights, and at a resume always "
        "permitted.",
    )
    sample_prompt: str = setting("", "Prompt that the merged model continues at the end of the run.")
    sample_tokens: int = setting(0, "Tokens to generate after sample_prompt; 0: none.", minimum=0)
    log_replicas: bool = setting(False, "Log the loss of each replica in the training metrics.")

    def __post_init__(self) -> None:
        """Fill the method's own fields that are not given from its defaults."""
        defaults = METHODS[self.method].defaults if self.method in METHODS else {}
        own = {name: value for name, value in defaults.items() if getattr(self.outer, name) is None}
        object.__setattr__(self, "outer", replace(self.outer, **own))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together train on in an inner step."""
        return self.num_replicas * self.data.batch_size * self.data.sequence_length
