"""How a tensor is cut into parts, the unit of digest, verification and repair. Must not know files or codecs."""

from weighbridge.values import Part, PartKey, TensorSpec

PART_BYTES = 256 << 20
"""The most bytes a part has. A multiple of every element's size, so that no element lies in two parts."""


def cut(spec: TensorSpec) -> tuple[Part, ...]:
    """The parts of a tensor in order of their offsets: one for anything up to PART_BYTES, an empty tensor included."""
    return tuple(
        Part(PartKey(spec.name, offset), spec.dtype, min(PART_BYTES, spec.nbytes - offset))
        for offset in range(0, max(spec.nbytes, 1), PART_BYTES)
    )
