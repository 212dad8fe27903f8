"""The tokenizer of the checkpoints that `make_checkpoint` writes: a token a byte, and a few special ones.

Token id = byte. There are no merges, so nothing is trained and every text can be written. The files are built
here and not saved by `tokenizers`, so that they are the same bytes under every version of it.
"""

from __future__ import annotations

from typing import Any

BYTES = 256
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]")  # ids from 256 on; the released checkpoint's names
BOS_ID, EOS_ID, END_ID, PAD_ID = range(BYTES, BYTES + len(SPECIAL))
VOCABULARY = BYTES + len(SPECIAL)


def byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it prints, else U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def tokenizer_json() -> dict[str, Any]:
    """The contents of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, **_added(name)} for number, name in enumerate(SPECIAL, start=BYTES)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "added_tokens_decoder": {str(number): _added(name) for number, name in enumerate(SPECIAL, start=BYTES)},
        "bos_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[2],
        "model_max_length": model_max_length,
        "pad_token": SPECIAL[3],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _added(name: str) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"content": name, **dict.fromkeys(flags, False), "special": True}
