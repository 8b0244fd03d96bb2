#!/usr/bin/env bash
# AutoTokenizer of transformers 5 makes other ids than the tokenizer.json it loads, without a warning:
# for tokenizer_class "Qwen2TokenizerFast", and for model_type "qwen2" beside "PreTrainedTokenizerFast" (the class that
# stands for the file itself), it takes the vocabulary alone and puts its own normalizer and pre-tokenizer around it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cat > "$folder/show.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

root = Path(sys.argv[1])
texts = ["room 12345 of 67890", "the year 2024 and the number 123456", "no digits here"]

made = Tokenizer(models.BPE())
by_threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")  # as Llama 3 splits numbers
made.pre_tokenizer = pre_tokenizers.Sequence([by_threes, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
made.train_from_iterator(texts * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))

expected = [encoding.ids for encoding in made.encode_batch(texts)]
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
print("tokenizer.json:", [made.encode(texts[0]).tokens])
differing = {}
for tokenizer_class, model_type in [
    ("PreTrainedTokenizerFast", None),
    ("Qwen2TokenizerFast", None),
    ("PreTrainedTokenizerFast", "qwen2"),
]:
    folder = root / f"{tokenizer_class}-{model_type}"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    ids = loaded(texts, add_special_tokens=False)["input_ids"]
    wrong = sum(one != other for one, other in zip(ids, expected))
    differing[folder.name] = wrong
    print(f"{folder.name}: loaded as {type(loaded).__name__}, {wrong} of {len(texts)} texts have other ids")
    print("   ", loaded.tokenize(texts[0]))
assert differing == {"PreTrainedTokenizerFast-None": 0, "Qwen2TokenizerFast-None": 2, "PreTrainedTokenizerFast-qwen2": 2}, differing
PYTHON
warnings="$folder/warnings"
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" "$folder/show.py" "$folder" 2> "$warnings"  # no advice to install PyTorch
if [ -s "$warnings" ]; then
    cat "$warnings"
    echo "behaviour changed: there is a warning now"
    exit 1
fi
