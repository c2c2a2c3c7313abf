"""A tokenizer for which every byte is a token: written as the JSON files that HF tokenizers read, without that library.

A token's id is the byte's own value, so the trainer needs no tokenizer; the files are for the engines that load one.
"""

from typing import Any

PAD, BOS, EOS = 256, 257, 258
SPECIAL_TOKENS = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
VOCABULARY = 256 + len(SPECIAL_TOKENS)


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Latin-1's visible characters stand for themselves; the other bytes take the code points from 256 on, in order
    (GPT-2's rule, which HF's ByteLevel pre-tokenizer follows).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {byte: chr(byte) for byte in visible}
    return alphabet | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


def tokenizer_json() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE with the 256 bytes as vocabulary and no merges, and the special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    alphabet = byte_alphabet()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **_PLAIN} for token, number in SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
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
            "vocab": {alphabet[byte]: byte for byte in range(256)} | SPECIAL_TOKENS,
            "merges": [],
        },
    }


def tokenizer_config_json(*, longest: int) -> dict[str, Any]:
    """tokenizer_config.json, for sequences of at most `longest` tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "added_tokens_decoder": {str(number): {"content": token, **_PLAIN} for token, number in SPECIAL_TOKENS.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }


def special_tokens_json() -> dict[str, str]:
    """special_tokens_map.json."""
    return {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
