"""6.29M parameters on C4 documents, a Llama to compare methods on a CPU within the hour.

    python -m noloco_jax.train --config=configs/c4_tiny.py --workdir=runs/c4_tiny \\
        --config.data.path=c4/en --config.data.tokenizer=TOKENIZER_FOLDER

The vocabulary of 4096 fits a small byte-level BPE; set `--config.model.vocab_size` for another tokenizer.
`--config=configs/c4_tiny.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md).
The paper measured nothing of this size. A few thousand documents are enough to run it, and are then seen several times
over.
"""

import runpy
from pathlib import Path

import noloco_jax


def get_config(method="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))

    config = noloco_jax.default_config()
    config.num_replicas = 4
    config.num_steps = 1000
    config.eval_every = 100
    config.checkpoint_every = 250

    config.model.hidden_size = 256
    config.model.intermediate_size = 1024
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.vocab_size = 4096

    inner = config.inner
    inner.lr = 6e-4
    inner.min_lr = inner.get_oneway_ref("lr") / 10
    inner.warmup_steps = 50

    paper["use_method"](config, inner, method, config.num_replicas)

    config.data.kind = "jsonl"
    config.data.tokenizer = ""  # given on the command line
    config.data.sequence_length = 256
    config.data.batch_size = 8
    return config
