"""The tokenizer of bytes in the form of Hugging Face's, which `transformers.AutoTokenizer` loads."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BOS, _EOS, _PAD = SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # 256, 257, 258, as `data.ByteTokenizer` numbers them
BYTE_SETTINGS = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}


def byte_backend() -> "Tokenizer":
    """Make the tokenizer: the bytes of UTF-8, each its own id, then the special tokens.

    Unlike in training, a special token that is written out in a text is that token.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def begin_with_bos(backend: "Tokenizer", number: int) -> None:
    """Let a tokenizer put BOS in front of a text, after its own post-processor, unless that puts it there already.

    Args:
      backend: the tokenizer.
      number: the id of BOS.
    """
    from tokenizers import processors

    if backend.encode("").ids[:1] == [number]:
        return
    bos = backend.id_to_token(number)
    with_bos = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, number)])
    own = backend.post_processor
    backend.post_processor = with_bos if own is None else processors.Sequence([own, with_bos])


def _letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself where it can be seen, else one above."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
