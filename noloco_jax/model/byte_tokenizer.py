"""The tokenizer of bytes in the form of Hugging Face's, which `transformers.AutoTokenizer` loads."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # 256, 257, 258, as `data.ByteTokenizer` numbers them


def save_byte_tokenizer(folder: Path, *, add_bos: bool = False) -> None:
    """Write tokenizer.json and its configuration: the bytes of UTF-8, each its own id, then the special tokens.

    Unlike in training, a special token that is written out in a text is that token.

    Args:
      folder: where to.
      add_bos: let it put BOS in front of a text.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    bos, eos, pad = SPECIAL
    if add_bos:
        begin_with_bos(backend, bos)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def begin_with_bos(backend: "Tokenizer", bos: str) -> None:
    """Let a tokenizer put BOS in front of a text, after its own post-processor, unless that puts it there already."""
    from tokenizers import processors

    number = backend.token_to_id(bos)
    if backend.encode("").ids[:1] == [number]:
        return
    with_bos = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", [(bos, number)])
    own = backend.post_processor
    backend.post_processor = with_bos if own is None else processors.Sequence([own, with_bos])


def _letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself where it can be seen, else one above."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
