"""Which rank publishes which tensor: exactly one of those that bring it, so that all carry alike. A function of what
the ranks bring, not of how they are numbered. Must not know tensors' bytes nor how ranks talk."""

from collections.abc import Collection, Mapping, Sequence

from weighbridge.values import TensorSpec


def plan(specs: Mapping[str, TensorSpec], size: int) -> dict[str, int]:
    """An owner for every tensor where nothing is known of who brings it: as if every rank brought all."""
    return assign(specs, [specs.keys()] * size, {})


def assign(
    specs: Mapping[str, TensorSpec], brought: Sequence[Collection[str]], before: Mapping[str, int]
) -> dict[str, int]:
    """The owner of every tensor that some rank brings; `brought` are their names by rank.

    The owner `before` keeps a tensor that it brings, since it holds its snapshot. All others go, the largest first, to
    the rank that carries least. Ranks are told apart by what they bring, so renumbering them moves nothing.
    """
    sets = [frozenset(names) for names in brought]
    order = sorted(range(len(sets)), key=lambda rank: sorted(sets[rank]))
    carries = dict.fromkeys(order, 0)
    owners: dict[str, int] = {}
    free: list[str] = []
    for name in specs:
        last = before.get(name, -1)
        if 0 <= last < len(sets) and name in sets[last]:
            owners[name] = last
            carries[last] += specs[name].nbytes
        else:
            free.append(name)
    for name in sorted(free, key=lambda name: (-specs[name].nbytes, name)):
        bringers = [rank for rank in order if name in sets[rank]]
        if bringers:
            owners[name] = min(bringers, key=carries.__getitem__)
            carries[owners[name]] += specs[name].nbytes
    return owners
