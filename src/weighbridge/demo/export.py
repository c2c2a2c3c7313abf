"""Writes the demo's model as a HF checkpoint folder that transformers, vLLM and SGLang load.

The format of the folder only; knows nothing of training.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from weighbridge.demo import tokenizer
from weighbridge.demo.shape import DecoderShape


def write_checkpoint(folder: Path, state: Mapping[str, Tensor], shape: DecoderShape) -> None:
    """Writes weights, config.json and tokenizer into `folder`, which is made if need be; files there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": shape.config_json(),
        "generation_config.json": shape.generation_config_json(),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config_json(longest=shape.longest),
        "special_tokens_map.json": tokenizer.special_tokens_json(),
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
