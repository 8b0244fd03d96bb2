#!/usr/bin/env bash
# A config.json whose top level and whose rope_scaling both have original_max_position_embeddings: the loaded config of
# transformers 5 shows the inner value, but the function that computes llama3's rotary frequencies standardizes the config
# once more, and then the outer value wins. So the printed config is not the one that the model computes with.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
cat > "$folder/config.json" <<'JSON'
{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 131072,
 "original_max_position_embeddings": 4096, "rope_theta": 500000.0,
 "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}}
JSON
cat > "$folder/show.py" <<'PYTHON'
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig

config = AutoConfig.from_pretrained(sys.argv[1])
loaded = config.rope_parameters["original_max_position_embeddings"]
# What the rotary embedding of every Llama calls; it needs PyTorch, so its source is looked at instead.
source = (Path(transformers.__file__).parent / "modeling_rope_utils.py").read_text(encoding="utf-8")
function = source[source.index("def _compute_llama3_parameters") :]
function = function[: function.index("old_context_len =")]
calls_it_first = "config.standardize_rope_params()" in function
config.standardize_rope_params()
computed = config.rope_parameters["original_max_position_embeddings"]
print("transformers", transformers.__version__)
print(f"after loading: {loaded}; once the rotary frequencies were computed: {computed}")
assert (calls_it_first, loaded, computed) == (True, 8192, 4096)
PYTHON
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" "$folder/show.py" "$folder"
