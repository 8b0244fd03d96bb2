"""The tokenizer of bytes in the form of Hugging Face's, which `transformers.AutoTokenizer` loads."""

from pathlib import Path

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # 256, 257, 258, as `data.ByteTokenizer` numbers them


def save_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and its configuration: the bytes of UTF-8, each its own id, then the special tokens.

    It adds no BOS by itself. Unlike in training, a special token that is written out in a text is that token.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    bos, eos, pad = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def _letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself where it can be seen, else one above."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
