"""A run's configuration: frozen dataclasses, each field with its default, its meaning and the values that it takes.

`on_resume` says of a field whether a run may go on from a checkpoint with another value. Who compares configurations
reads it through `changes.py`.

Names and meanings are part of the public interface: `--config.outer.sync_every=25` sets `TrainConfig.outer.sync_every`.
"""

from dataclasses import MISSING, dataclass, replace

from noloco_jax.config.schema import NO_ENTRIES, Entries, setting
from noloco_jax.methods import METHODS
from noloco_jax.wires import WIRES


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies; the names are those of a Hugging Face config.json."""

    factor: float = setting(MISSING, "Divisor of the low frequencies.", on_resume="must match", above=0)
    low_freq_factor: float = setting(
        MISSING,
        "Turns in the original context under which a frequency is divided by the whole factor.",
        on_resume="must match",
        above=0,
    )
    high_freq_factor: float = setting(
        MISSING, "Turns in the original context above which a frequency is left alone.", on_resume="must match", above=0
    )
    original_max_position_embeddings: int = setting(
        MISSING, "Tokens of the context that the frequencies were made for.", on_resume="must match", minimum=1
    )


@dataclass(frozen=True)
class ModelConfig:
    """The Llama that every replica trains."""

    hidden_size: int = setting(256, "Width of the residual stream.", on_resume="must match", minimum=1)
    intermediate_size: int = setting(1024, "Width of the feed-forward layers.", on_resume="must match", minimum=1)
    num_layers: int = setting(4, "Transformer layers.", on_resume="must match", minimum=1)
    num_heads: int = setting(4, "Attention heads of a layer.", on_resume="must match", minimum=1)
    num_kv_heads: int = setting(
        4, "Heads of keys and values of a layer, which the attention heads share.", on_resume="must match", minimum=1
    )
    vocab_size: int = setting(
        259, "Token ids that the model knows; the byte tokenizer has 259.", on_resume="must match", minimum=1
    )
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", on_resume="must match", above=0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = setting(1e-5, "Number added to the mean square in RMSNorm.", on_resume="must match", above=0)
    tie_embeddings: bool = setting(
        False, "Whether the output layer is the token embedding's matrix.", on_resume="must match"
    )
    dtype: str = setting("float32", "Type of the computation.", on_resume="may change", choices=("float32", "bfloat16"))
    param_dtype: str = setting(
        "float32",
        "Type of the weights that the inner optimizer steps.",
        on_resume="must match",
        choices=("float32", "bfloat16"),
    )
    remat: str = setting(
        "none",
        "What the backward pass computes again: nothing, full layers, all but matrix products (dots), or whole "
        "pipeline stages.",
        on_resume="may change",
        choices=("none", "full", "dots", "stage"),
    )


@dataclass(frozen=True)
class InnerConfig:
    """Steps inside a replica, the learning rate rising linearly in a warmup and then going as `schedule` says."""

    optimizer: str = setting(
        "adam",
        "What steps the weights: Adam, AdamW, or Muon the layers' matrices and AdamW embedding, head and norms.",
        on_resume="must match",
        choices=("adam", "adamw", "muon"),
    )
    lr: float = setting(6e-4, "Learning rate after the warmup.", on_resume="may change", above=0)
    adam_lr: float | None = setting(
        None,
        "Learning rate of what muon leaves to AdamW, on the schedule of lr; None: a tenth of inner.lr.",
        on_resume="may change",
        above=0,
    )
    min_lr: float = setting(
        6e-5,
        "Learning rate at the end of the run, unless the schedule is constant.",
        on_resume="may change",
        minimum=0,
    )
    warmup_steps: int = setting(
        20, "Inner steps over which the learning rate rises linearly to lr.", on_resume="may change", minimum=0
    )
    schedule: str = setting(
        "cosine",
        "How the learning rate goes after the warmup: along a cosine to min_lr, level and then linearly to min_lr "
        "(wsd), or level.",
        on_resume="may change",
        choices=("cosine", "wsd", "constant"),
    )
    decay_share: float = setting(
        0.2, "Share of num_steps over which wsd lowers the learning rate.", on_resume="may change", above=0, below=1
    )
    clip_norm: float = setting(
        1.0,
        "Largest norm of a replica's gradient over all its weights, to which a longer one is scaled down; 0: none is.",
        on_resume="may change",
        minimum=0,
    )
    b1: float = setting(
        0.9, "Adam's decay of the mean of gradients, per step.", on_resume="may change", minimum=0, below=1
    )
    b2: float = setting(
        0.999, "Adam's decay of the mean of squared gradients, per step.", on_resume="may change", minimum=0, below=1
    )
    eps: float = setting(1e-8, "Number added to the root of Adam's second moment.", on_resume="may change", above=0)
    momentum: float = setting(
        0.95, "Muon's decay of its momentum, per step.", on_resume="may change", minimum=0, below=1
    )
    weight_decay: float = setting(
        0.0,
        "Share of a weight that a step takes off it, times its learning rate (adamw and muon).",
        on_resume="may change",
        minimum=0,
    )


@dataclass(frozen=True)
class OuterConfig:
    """The step between replicas; all methods but `ddp` and `local` take it every `sync_every` inner steps.

    Fields that are None by default are the method's own: a `TrainConfig` fills those that its method uses from the
    method's row in `methods.py`, and the others stay None. What a config file sets of them is meant for the file's
    method: where a flag names another method, that one's own defaults hold, unless flags set the fields too.
    """

    lr: float = setting(None, "Outer learning rate, the paper's beta.", on_resume="may change", above=0)
    momentum: float = setting(None, "Outer momentum, the paper's alpha.", on_resume="may change", minimum=0, below=1)
    momentum_of: str = setting(
        None,
        "What outer momentum carries: steps, as in the paper, or corrections: what came from the others alone, which "
        "leaves the replicas' mean as it is (noloco only).",
        on_resume="may change",
        choices=("steps", "corrections"),
    )
    consensus: float | None = setting(
        None,
        "Pull towards the group's mean, the paper's gamma; None: equal to outer.lr (noloco only).",
        on_resume="may change",
        minimum=0,
    )
    sync_every: int = setting(None, "Inner steps between two outer steps.", on_resume="may change", minimum=1)
    group_size: int = setting(
        None,
        "Replicas that average with one another in an outer step (noloco only).",
        on_resume="may change",
        minimum=1,
    )
    order: str = setting(
        None,
        "How pairings are drawn: in shuffled passes over their pool, one by one independently, as in the paper, or so "
        "that log2(num_replicas) rounds in a row average all, where that is a whole number (hypercube; noloco only).",
        on_resume="may change",
        choices=("passes", "independent", "hypercube"),
    )
    nesterov: bool = setting(
        None,
        "Whether the outer momentum is Nesterov's, as in DiLoCo's own paper; False: heavy ball (diloco only).",
        on_resume="may change",
    )
    wire: str = setting(
        None,
        "Form in which messages between replicas travel; int8, int6 and int4: in blocks of weights with a scale each "
        "(noloco only).",
        on_resume="may change",
        choices=WIRES,
    )
    state_dtype: str = setting(
        "float32",
        "Type in which slow weights and outer momentum are kept.",
        on_resume="must match",
        choices=("float32", "bfloat16"),
    )
    fragments: int = setting(
        1,
        "Equal parts of the parameters, each of which has its own outer steps, one in every sync_every inner steps; a "
        "divisor of model.hidden_size.",
        on_resume="must match",
        minimum=1,
    )
    delay: int = setting(
        0,
        "Inner steps after which what the others sent in an outer step enters, as if it were sent in the background; "
        "at most sync_every.",
        on_resume="must match",
        minimum=0,
    )
    moments: int = setting(
        0,
        "After every how many outer steps of a fragment the inner optimizer's moments are averaged too; 0: never.",
        on_resume="may change",
        minimum=0,
    )
    final_steps: int = setting(
        0, "Inner steps at the end of the run in which outer.final_sync_every holds.", on_resume="may change", minimum=0
    )
    final_sync_every: int = setting(
        1, "Inner steps between two outer steps in the last outer.final_steps.", on_resume="may change", minimum=1
    )
    final_merge: bool = setting(
        False,
        "Whether the run ends with all replicas at the mean of their weights, by log2(num_replicas) rounds of pairs.",
        on_resume="may change",
    )
    neighbours: int | None = setting(
        None,
        "Others to which a replica sends its weights in an outer step, and from which it receives; None: log2 of "
        "num_replicas, rounded up (epidemic only).",
        on_resume="may change",
        minimum=1,
    )
    error_decay: float = setting(
        None,
        "Share that an outer step keeps of what was not sent yet, SparseLoCo's beta (sparseloco only).",
        on_resume="may change",
        minimum=0,
        below=1,
    )
    top_k: int = setting(
        None,
        "Entries that are sent of every chunk of 4096 weights, rounded up to a multiple of 4 (sparseloco only).",
        on_resume="may change",
        minimum=1,
        below=4097,
    )
    offload: bool = setting(
        False, "Whether slow weights and outer momentum stay in host memory between outer steps.", on_resume="free"
    )


DATA_KINDS = ("c4", "jsonl", "parquet", "text")
_TEXT_COLUMN = "text"


@dataclass(frozen=True)
class SourceConfig:
    """A source of a mixture; its fields mean what those of a run's only source mean."""

    kind: str = setting(
        MISSING, "What its path holds, in the words of data.kind.", on_resume="must match", choices=DATA_KINDS
    )
    weight: float = setting(
        MISSING,
        "Its share of the tokens that are trained and validated on, in proportion to the weights of the other sources.",
        on_resume="may change",
        above=0,
    )
    path: str = setting("", "File or folder of its training documents.", on_resume="may change")
    validation_path: str = setting(
        "",
        "File or folder of its validation documents; empty: those found beside its path or held out of it.",
        on_resume="may change",
    )
    text_column: str = setting(
        _TEXT_COLUMN,
        "The field or column of its documents that holds their text.",
        on_resume="must match",
        nonempty=True,
    )


@dataclass(frozen=True)
class DataConfig:
    """Which documents a run reads, and how they become batches."""

    kind: str = setting(
        "text",
        "What data.path holds: C4's gzipped JSON lines, JSON lines under any name, Parquet files, or text files; "
        "mixture: the sources are in data.mixture.",
        on_resume="must match",
        choices=(*DATA_KINDS, "mixture"),
    )
    path: str = setting("", "File or folder of the training documents.", on_resume="may change")
    validation_path: str = setting(
        "",
        "File or folder of the validation documents; empty: those found beside data.path or held out of it.",
        on_resume="may change",
    )
    text_column: str = setting(
        _TEXT_COLUMN,
        "The field of a JSON line or the Parquet column that holds a document's text; one of another name "
        "than text is read even where tokens stand beside it.",
        on_resume="must match",
        nonempty=True,
    )
    tokenizer: str = setting(
        "byte",
        "'byte' (a token per byte), or the name or folder of a transformers tokenizer.",
        on_resume="may change",
        nonempty=True,
    )
    add_bos: bool = setting(True, "Whether a document begins with the tokenizer's BOS token.", on_resume="must match")
    add_eos: bool = setting(True, "Whether a document ends with the tokenizer's EOS token.", on_resume="must match")
    sequence_length: int = setting(256, "Tokens of a sequence.", on_resume="may change", minimum=1)
    batch_size: int = setting(
        8, "Sequences that a replica trains on in an inner step.", on_resume="may change", minimum=1
    )
    document_mask: bool = setting(
        False,
        "Whether a token attends to its own document alone; what follows a document's last token is then no label.",
        on_resume="may change",
    )
    num_workers: int = setting(
        0,
        "Processes that read and tokenize for each replica; 0: a thread of the run's own process does.",
        on_resume="free",
        minimum=0,
    )
    shuffle_buffer: int = setting(
        1000, "Documents that are shuffled together; 1 keeps the files' order.", on_resume="must match", minimum=1
    )
    on_bad_shard: str = setting(
        "stop",
        "What to do at a file that does not decode: stop, or skip the rest of it with a warning.",
        on_resume="may change",
        choices=("stop", "skip"),
    )
    mixture: Entries[SourceConfig] = NO_ENTRIES


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh, and how micro-batches pass through it."""

    replica: int = setting(
        -1,
        "Devices among which the replicas are shared out; -1: what the other axes leave.",
        on_resume="may change",
        minimum=1,
        besides=-1,
    )
    stage: int = setting(1, "Pipeline stages that a replica's layers are cut into.", on_resume="may change", minimum=1)
    fsdp: int = setting(
        1,
        "Devices that shard a replica's weights and share out its batch; -1: what the other axes leave.",
        on_resume="may change",
        minimum=1,
        besides=-1,
    )
    tensor: int = setting(
        1,
        "Devices that split every layer's matrix products; -1: what the other axes leave.",
        on_resume="may change",
        minimum=1,
        besides=-1,
    )
    routing: str = setting(
        "random",
        "Which replica's next stage a micro-batch enters: a random one's, or always that of its own replica.",
        on_resume="may change",
        choices=("random", "fixed"),
    )


@dataclass(frozen=True)
class TrainConfig:
    """All of a run."""

    method: str = setting(
        "noloco",
        "How replicas average: in small groups, all together, gradients at every step, or never.",
        on_resume="must match",
        choices=tuple(METHODS),
    )
    num_replicas: int = setting(4, "Replicas of the model that train.", on_resume="may change", minimum=1, below=2**14)
    num_steps: int = setting(1000, "Inner steps of the run.", on_resume="may change", minimum=1)
    seed: int = setting(
        0,
        "Number that initial weights, data order and pairings are drawn from.",
        on_resume="must match",
        minimum=0,
        below=2**64,
    )
    num_microbatches: int = setting(
        1, "Parts of a replica's batch that are computed one after another.", on_resume="may change", minimum=1
    )
    model: ModelConfig = ModelConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    eval_every: int = setting(
        500,
        "Inner steps between two evaluations; there is one at the end too, and with 0 no other.",
        on_resume="may change",
        minimum=0,
    )
    eval_batches: int = setting(16, "Validation batches of an evaluation.", on_resume="may change", minimum=1)
    log_every: int = setting(10, "Inner steps between two lines of training metrics.", on_resume="free", minimum=1)
    checkpoint_every: int = setting(
        500, "Inner steps between two checkpoints; there is one at the end too.", on_resume="free", minimum=1
    )
    keep_checkpoints: int = setting(2, "Newest checkpoints that are kept.", on_resume="free", minimum=1)
    keep_period: int = setting(
        0, "Checkpoints of steps that it divides are kept for good; 0: only the newest.", on_resume="free", minimum=0
    )
    elastic: str = setting(
        "",
        "What becomes of a checkpoint's replicas where num_replicas has changed: fewer merge several into one or keep "
        "some, more copy theirs; empty: the run is refused.",
        on_resume="free",
        choices=("", "merge", "keep", "copy"),
    )
    init_from: str = setting(
        "", "Hugging Face folder whose weights the run starts from; empty: random weights.", on_resume="may change"
    )
    sample_prompt: str = setting("", "Text that the merged model continues at the end of the run.", on_resume="free")
    sample_tokens: int = setting(0, "Tokens of that continuation; 0: none is made.", on_resume="free", minimum=0)
    log_replicas: bool = setting(False, "Whether training metrics have the loss of each replica.", on_resume="free")

    def __post_init__(self) -> None:
        """Fill the method's own fields that are not given from its defaults."""
        defaults = METHODS[self.method].defaults if self.method in METHODS else {}
        own = {name: value for name, value in defaults.items() if getattr(self.outer, name) is None}
        object.__setattr__(self, "outer", replace(self.outer, **own))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together train on in an inner step."""
        return self.num_replicas * self.data.batch_size * self.data.sequence_length
