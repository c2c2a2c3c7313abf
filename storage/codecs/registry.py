"""The codecs by name. A name that is not registered is a typed error, never a guess."""

from collections.abc import Mapping

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs.contract import Codec
from weighbridge.storage.codecs.expgap import ExpGapCodec
from weighbridge.storage.codecs.full import FullCodec
from weighbridge.storage.codecs.gap import GapCodec
from weighbridge.storage.codecs.overwrite import OverwriteCodec
from weighbridge.storage.codecs.xor import XorCodec

CODECS: Mapping[str, Codec] = {
    codec.name: codec for codec in (ExpGapCodec(), GapCodec(), FullCodec(), XorCodec(), OverwriteCodec())
}


def get_codec(name: str) -> Codec:
    """The codec of a name. Raises PayloadCorrupt for one that is unknown here."""
    try:
        return CODECS[name]
    except KeyError:
        known = ", ".join(CODECS)
        raise PayloadCorrupt(
            f"codec {name[:80]!r} is not known here (known: {known}); nothing was written. Upgrade weighbridge."
        ) from None
