"""How an endpoint is spoken to, beyond its URL. Never holds a credential: those come from the provider's own chain
(environment, config files, metadata service), and a profile may be printed, logged and passed about."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from weighbridge.errors import UsageError

Addressing = Literal["auto", "path", "virtual"]
Checksums = Literal["when_supported", "when_required"]

_SLOWEST_BYTES = 256 << 10  # a second; a link below that is as good as broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What differs between endpoints of one kind.

    `endpoint_url` is a server other than the provider's own. `addressing` "path" puts the bucket into the path, as many
    S3-compatible servers want. `checksums` "when_required" leaves out S3's newer integrity headers, which some gateways
    refuse (shards and manifests carry digests of their own). `credentials_profile` names a section of the provider's
    own configuration files. `anonymous` sends no credentials. `call_seconds` bounds a request, with a second more for
    every 256 KiB that it carries. `parts` and `part_bytes` bound what an upload holds (clients copy some of it).
    """

    endpoint_url: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    checksums: Checksums = "when_supported"
    credentials_profile: str | None = None
    anonymous: bool = False
    call_seconds: float = 30.0
    part_bytes: int = 8 << 20
    parts: int = 4

    def __post_init__(self) -> None:
        """Raises UsageError for what no endpoint can be."""
        if self.endpoint_url is not None:
            url = urlsplit(self.endpoint_url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise UsageError(f"{self.endpoint_url!r} is not an endpoint: give http://host:port or https://host.")
            if url.username or url.password or url.query:
                raise UsageError(
                    "an endpoint's URL must not hold a credential: put it into the environment or the provider's "
                    "configuration file, where it is not printed."
                )
        if self.call_seconds <= 0 or self.parts < 1 or self.part_bytes < 5 << 20 or self.part_bytes % (1 << 18):
            raise UsageError(
                "a profile needs call_seconds above 0, at least 1 part, and part_bytes of 5 MiB or more in steps of "
                "256 KiB."
            )

    def seconds(self, nbytes: int) -> float:
        """The deadline of a request that carries `nbytes`, either way."""
        return self.call_seconds + nbytes / _SLOWEST_BYTES
