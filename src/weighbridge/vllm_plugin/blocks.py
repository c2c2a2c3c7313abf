"""Which tensors of a checkpoint have to be loaded when some of them changed: whole blocks, since an engine fuses the
tensors of one (q, k, v; gate and up; all experts) and can only load a fused weight whole. Must not know vLLM."""

from collections.abc import Iterable, Mapping


def block_of(name: str) -> str:
    """The block that a tensor belongs to: within a numbered layer the part below it (`model.layers.3.self_attn`,
    `model.layers.3.mlp` with all of its experts), outside of one the module itself (`model.embed_tokens`).

    No engine fuses across these; and one that did would be noticed when it has loaded (see backend.py).
    """
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: at + 2])
    return ".".join(parts[:-1]) or name


def to_load(names: Iterable[str], held: Mapping[str, str] | None, wanted: Mapping[str, str]) -> list[str]:
    """Those of a folder's tensors to load, in their order: all blocks in which a tensor's digest differs.

    `held` and `wanted` are digests by tensor, of what the engine holds and of what it is to hold; `held` None: not
    known. A tensor without a digest on either side counts as changed.
    """
    ordered = list(names)
    if held is None:
        return ordered
    changed = {block_of(name) for name in ordered if name not in wanted or held.get(name) != wanted[name]}
    return [name for name in ordered if block_of(name) in changed]
