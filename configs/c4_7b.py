"""9.64B parameters on C4: the paper's 6.8B Llama (4096 wide, 32 layers) with Llama 3's tokenizer.

16 replicas, 2M tokens a step, 25,000 steps.

The data is the English part of C4, some 300 GB in `c4-{train,validation}.*.json.gz` files, which are read from the hub;
the tokenizer is Llama 3's, whose licence has to be accepted once on its page:

    export HF_TOKEN=...
    python -m noloco_jax.train --config=configs/c4_7b.py --workdir=runs/c4_7b \\
        --config.data.path=hf://datasets/allenai/c4/en

Without a login, add `--config.data.tokenizer=EleutherAI/gpt-neox-20b --config.model.vocab_size=50304`.

`--config=configs/c4_7b.py:diloco` runs another method (noloco, diloco, ddp, local; best: configs/README.md);
`:noloco,replicas=32,stages=4` shares the same global batch out among other replicas. The paper's FSDP is `:ddp`, or,
with one copy sharded over 8 devices, `:ddp,replicas=1 --config.mesh.fsdp=8`.

A replica needs several GPUs: with `--config.mesh.fsdp=4` an inner step asks 52 GiB of each, by XLA's account of the
compiled program.

Measured by the paper (Table 2, validation perplexity on C4 after 25,000 steps):

                                        FSDP  DiLoCo  NoLoCo
    16 replicas of 4 pipeline stages    15.7    17.3    16.6
"""

import runpy
from pathlib import Path


def get_config(argument="noloco"):
    paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))
    return paper["paper_config"](argument, size="7b", data="c4")
