"""The sizes of the demo's decoder, and what follows from them: config.json, and each tensor's HF name and shape.

Numbers only; knows nothing of torch.
"""

from dataclasses import dataclass
from typing import Any

from weighbridge.demo.tokenizer import BOS, EOS, PAD, VOCABULARY


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Llama decoder with untied embeddings; the default has 25.4 million parameters."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    key_value_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = VOCABULARY
    longest: int = 2048
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    def config_json(self) -> dict[str, Any]:
        """config.json, as transformers and the engines read it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.longest,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }

    def generation_config_json(self) -> dict[str, Any]:
        """generation_config.json: the special tokens, and sampling as the trainer samples."""
        return {"do_sample": True, "temperature": 1.0, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's HF name and shape, in the order of the layers."""
        queries = self.heads * self.head_dim
        values = self.key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "self_attn.q_proj.weight": (queries, self.hidden),
                prefix + "self_attn.k_proj.weight": (values, self.hidden),
                prefix + "self_attn.v_proj.weight": (values, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, queries),
                prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
            }
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}
