"""310M parameters on C4: the paper's 125M Llama (768 wide, 12 layers) with Llama 3's tokenizer.

8 replicas, 0.5M tokens a step, 25,000 steps.

The data is the English part of C4, some 300 GB in `c4-{train,validation}.*.json.gz` files, which are read from the hub;
the tokenizer is Llama 3's, whose licence has to be accepted once on its page:

    export HF_TOKEN=...
    python -m noloco_jax.train --config=configs/c4_125m.py --workdir=runs/c4_125m \\
        --config.data.path=hf://datasets/allenai/c4/en

Without a login, add `--config.data.tokenizer=EleutherAI/gpt-neox-20b --config.model.vocab_size=50304`.

`--config=configs/c4_125m.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=4,stages=2` shares the same global batch out among other replicas. The paper's FSDP is `:ddp`, or,
with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

All 8 replicas on one GPU of 80 GB: add `--config.num_microbatches=8` (65 GiB of the 68 that a run may use; 50 GiB with
`--config.outer.offload=True`, as measured on an H200). One replica a GPU: 30 GiB.

Measured by the paper (Table 2, validation perplexity on C4 after 25,000 steps):

                                        FSDP  DiLoCo  NoLoCo
    8 replicas                          29.1    35.4    34.5
    4 replicas of 2 pipeline stages     29.1    32.1    31.3
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="125m", data="c4")
