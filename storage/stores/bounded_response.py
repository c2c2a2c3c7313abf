"""An answer of an HTTP server that is read up to a bound, whatever the server sends: aiohttp, and clients on top of it,
read to the end. Must not know which store is asked."""

from contextvars import ContextVar

import aiohttp

from weighbridge.errors import ObjectTooLarge

_CHUNK_BYTES = 1 << 20
_REFUSAL_BYTES = 1 << 20
"""What a server may say of why it does not answer, whatever was asked for."""

most_bytes: ContextVar[int | None] = ContextVar("most_bytes", default=None)
"""The most bytes that answers to the requests of this task may have; None: no bound."""


class BoundedResponse(aiohttp.ClientResponse):
    """See the module. Given to a session as its `response_class`."""

    async def read(self) -> bytes:
        """The body. Raises ObjectTooLarge as soon as there is more of it than `most_bytes` allows."""
        most = most_bytes.get()
        if most is None or self._body is not None:
            return await super().read()
        most = _REFUSAL_BYTES if self.status >= 400 else most
        body = bytearray()
        try:
            async for piece in self.content.iter_chunked(_CHUNK_BYTES):
                body += piece
                if len(body) > most:
                    raise ObjectTooLarge(
                        f"{self.url.origin()} sends more than the {most:,} bytes that an answer can have here: it is "
                        "not what was published. The rest was not read; restore it or audit the store."
                    )
        except BaseException:
            self.close()
            raise
        self._body = bytes(body)
        return await super().read()
