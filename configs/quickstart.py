"""591k parameters on Python's standard library: NoLoCo with 4 virtual replicas, in minutes on two CPU cores.

    bash launch/quickstart.sh

or, where the package is installed,

    python -m noloco_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Expect a validation perplexity per byte below 5, and the merged model no worse than the mean of the replicas.
"""

import sysconfig

import noloco_jax


def get_config():
    config = noloco_jax.default_config()
    config.method = "noloco"
    config.num_replicas = 4
    config.num_steps = 2400
    config.log_every = 50
    config.eval_every = 400
    config.eval_batches = 64
    config.checkpoint_every = 800
    config.sample_prompt = "def "
    config.sample_tokens = 200

    config.model.hidden_size = 128
    config.model.intermediate_size = 512
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.vocab_size = 259  # 256 bytes, BOS, EOS and padding

    config.inner.lr = 2e-3
    config.inner.min_lr = config.inner.get_oneway_ref("lr") / 20
    config.inner.warmup_steps = 100
    config.inner.b2 = 0.98  # a short memory, for a short run

    config.outer.sync_every = 10

    config.data.kind = "text"
    config.data.path = sysconfig.get_path("stdlib")
    config.data.tokenizer = "byte"
    config.data.sequence_length = 128
    config.data.batch_size = 2
    return config
