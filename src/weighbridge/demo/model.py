"""A decoder in plain torch that computes what HF's Llama computes and names its tensors as HF does.

Knows nothing of training, files or weighbridge; `sample` draws continuations from it.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from weighbridge.demo.shape import DecoderShape


class KeyValues:
    """What one layer's attention has seen so far: keys and values of shape (batch, heads, tokens, head_dim)."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest tokens' and returns all of them."""
        self._keys = keys if self._keys is None else torch.cat((self._keys, keys), dim=2)
        self._values = values if self._values is None else torch.cat((self._values, values), dim=2)
        return self._keys, self._values


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of 1, then by a learned weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`, (..., size)."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self._epsilon)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values, and rotary positions."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._shape = shape
        queries, values = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, values, bias=False)
        self.v_proj = nn.Linear(shape.hidden, values, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], seen: KeyValues | None) -> Tensor:
        """`x` is (batch, tokens, hidden). With `seen`, tokens after the first call come one at a time."""
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self._shape.head_dim)
        query = _rotate(self.q_proj(x).view(heads).transpose(1, 2), rotation)
        key = _rotate(self.k_proj(x).view(heads).transpose(1, 2), rotation)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if seen is not None:
            key, value = seen.extend(key, value)
        group = self._shape.heads // self._shape.key_value_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            is_causal=tokens > 1,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention, then the feed-forward part; each sees a normed input and adds to the stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_epsilon)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], seen: KeyValues | None) -> Tensor:
        """Same shape as `x`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything but the head; HF calls it `model`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_epsilon)


class Decoder(nn.Module):
    """The whole model. `seed` alone decides its first weights: torch's global generator is neither used nor moved."""

    def __init__(self, shape: DecoderShape, *, seed: int) -> None:
        super().__init__()
        self.shape = shape
        # torch's own initialisers draw from the global generator, which belongs to the caller.
        with torch.random.fork_rng(devices=[]):
            self.model = Trunk(shape)
            self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        # N(0, 0.02); what writes into the stream is smaller, since 2 x layers of them add up (GPT-2's rule).
        narrow = 0.02 / math.sqrt(2 * self.shape.layers)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=narrow if writes else 0.02, generator=generator)

    def forward(self, ids: Tensor, seen: list[KeyValues] | None = None, start: int = 0) -> Tensor:
        """Logits (batch, tokens, vocabulary) in fp32 for `ids` (batch, tokens), the first of which is token `start`."""
        x = self.model.embed_tokens(ids)
        rotation = self._rotation(start, ids.shape[1])
        for number, layer in enumerate(self.model.layers):
            x = layer(x, rotation, None if seen is None else seen[number])
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    def _rotation(self, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (tokens, head_dim) of HF Llama's rotary embedding: both halves turn alike."""
        size = self.shape.head_dim
        frequency = 1.0 / self.shape.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.outer(torch.arange(start, start + tokens, dtype=torch.float32), frequency).repeat(1, 2)
        return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


@torch.no_grad()
def sample(model: Decoder, prompts: Tensor, *, tokens: int, generator: torch.Generator) -> Tensor:
    """Draws `tokens` bytes after each of `prompts` (batch, tokens) at temperature 1; returns them alone.

    Special tokens are never drawn, so that every continuation is text.
    """
    seen = [KeyValues() for _ in range(model.shape.layers)]
    drawn: list[Tensor] = []
    fresh, start = prompts, 0
    for _ in range(tokens):
        chances = model(fresh, seen, start)[:, -1, :256].softmax(dim=-1)
        start += fresh.shape[1]
        fresh = torch.multinomial(chances, 1, generator=generator)
        drawn.append(fresh)
    return torch.cat(drawn, dim=1)
