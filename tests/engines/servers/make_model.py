"""A tiny random Qwen3 with a byte-level tokenizer of its own, in bf16: its embeddings untied unless --tied, its MLPs
dense unless --moe. Runs in an engine's environment. usage: make_model.py FOLDER [--seed N] [--hidden N] [--layers N]"""

import argparse
import string

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_VOCABULARY = 512
_SPECIAL = ["<pad>", "<bos>", "<eos>"]
_TEXTS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "reinforcement learning by synchronising deltas of weights between hosts ",
    string.printable,
] * 4


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--moe", action="store_true")
    options = parser.parse_args()
    _tokenizer().save_pretrained(options.folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": options.hidden}
    kind = transformers.Qwen3MoeConfig if options.moe else transformers.Qwen3Config
    config = kind(
        **(experts if options.moe else {}),
        vocab_size=_VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 2,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=options.tied,
        initializer_range=0.15,
        dtype="bfloat16",
    )
    torch.manual_seed(options.seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(options.folder)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(_SPECIAL),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


if __name__ == "__main__":
    main()
