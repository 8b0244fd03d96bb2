"""2.14B parameters on C4: the paper's 1.3B Llama (2048 wide, 24 layers) with Llama 3's tokenizer.

8 replicas, 1M tokens a step, 25,000 steps.

The data is the English part of C4, some 300 GB in `c4-{train,validation}.*.json.gz` files, which are read from the hub;
the tokenizer is Llama 3's, whose licence has to be accepted once on its page:

    export HF_TOKEN=...
    python -m noloco_jax.train --config=configs/c4_1b.py --workdir=runs/c4_1b \\
        --config.data.path=hf://datasets/allenai/c4/en

Without a login, add `--config.data.tokenizer=EleutherAI/gpt-neox-20b --config.model.vocab_size=50304`.

`--config=configs/c4_1b.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=16,stages=2` shares the same global batch out among other replicas. The paper's FSDP is `:ddp`, or,
with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

On GPUs of 80 GB, one replica each, add `--config.outer.offload=True` (56 GiB in an inner step, by XLA's account of the
compiled program; 71 GiB without it do not fit) or `--config.mesh.fsdp=2`.

Measured by the paper (Table 2, validation perplexity on C4 after 25,000 steps):

                                        FSDP  DiLoCo  NoLoCo
    8 replicas of 2 pipeline stages     18.8    21.8    21.1
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="1b", data="c4")
