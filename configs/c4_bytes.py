"""591k parameters on the bytes of C4 documents, a Llama to compare methods: each takes a minute or two.

    python -m noloco_jax.compare --config=configs/c4_bytes.py --methods=ddp,diloco,noloco,local --seeds=3 \\
        --workdir=runs/comparison --config.data.path=c4/en

or one run of it:

    python -m noloco_jax.train --config=configs/c4_bytes.py --workdir=runs/c4_bytes --config.data.path=c4/en

`c4/en` may be the hub's, `hf://datasets/allenai/c4/en`.

61 outer steps of NoLoCo, 30 of DiLoCo. Evaluations fall right after an outer step of NoLoCo, and of DiLoCo every second
time half-way between two. For 8 replicas on the same tokens add `--config.num_replicas=8 --config.data.batch_size=1`.

Measured (4 replicas, 3 seeds, 0.6M tokens): validation perplexity per byte ddp 8.2, noloco 9.3, diloco 9.5, local 10.9.
"""

import noloco_jax


def get_config():
    config = noloco_jax.default_config()
    config.method = "noloco"
    config.num_replicas = 4
    config.num_steps = 610
    config.eval_every = 50
    config.eval_batches = 32
    config.checkpoint_every = 610
    config.keep_checkpoints = 1

    config.model.hidden_size = 128
    config.model.intermediate_size = 512
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.vocab_size = 259  # 256 bytes, BOS, EOS and padding

    config.inner.lr = 2e-3
    config.inner.min_lr = config.inner.get_oneway_ref("lr") / 10
    config.inner.warmup_steps = 50

    config.outer.sync_every = 10

    config.data.kind = "jsonl"
    config.data.tokenizer = "byte"
    config.data.sequence_length = 128
    config.data.batch_size = 2
    return config
