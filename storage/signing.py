"""Whose versions are believed: Ed25519 keys, a manifest's signature, and what a host that trusts keys asks of a
manifest. docs/FORMAT.md gives the bytes. Must not know stores, nor which version comes next."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from weighbridge.errors import ForeignSignature, Frozen, NotTrusted, Unsigned, UsageError
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.localdisk import PRIVATE_FILE, SHARED_FILE, Disk
from weighbridge.values import Manifest

SIGNED_DIGEST = "blake3"
"""The only digest kind under which a signature says anything of the weights."""

_MOST_KEY_BYTES = 16 << 10
_FUTURE_SECONDS = 300.0  # by how much clocks of two machines may differ


class Signer:
    """A trainer's private key. Its repr and its pickle hold nothing of it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"Signer({self.public.name})"

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled")

    @property
    def public(self) -> "PublicKey":
        """The key by which others know it."""
        return PublicKey(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, zeroed: bytes) -> str:
        """The signature, in hex, over a manifest's bytes with both self-referring fields zeroed."""
        return self._key.sign(zeroed).hex()


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key's 32 bytes."""

    raw: bytes

    @property
    def name(self) -> str:
        """What people call it: the first 16 hex digits of the blake3 of its bytes."""
        return chain_digest(self.raw)[:16]

    def fits(self, signature: str, zeroed: bytes) -> bool:
        """Whether a signature (hex) over these bytes is this key's."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(bytes.fromhex(signature), zeroed)
        except InvalidSignature:
            return False
        return True


def is_signed(head: Manifest) -> bool:
    """Whether a manifest has a signature at all, be it whose it may."""
    return set(head.signature) != {"0"}


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys whose versions a reader believes (several while one is replaced by the next), and how many seconds old,
    by this machine's clock and the writer's, the newest version may be; None: any age."""

    keys: tuple[PublicKey, ...]
    max_age_seconds: float | None = None

    def check(self, head: Manifest, zeroed: bytes, where: str) -> None:
        """Whether a version's manifest is signed by a trusted key. Anchors are not: they are believed for being the
        state that a signed version names. Raises NotTrusted, Unsigned, ForeignSignature."""
        if head.kind == "anchor":
            return
        if not is_signed(head):
            raise Unsigned(
                f"{where} is not signed, and only versions signed by {self._names} are believed here. Nothing was "
                "written; have the trainer sign (`--sign KEY`), from a fresh root on."
            )
        if not any(key.fits(head.signature, zeroed) for key in self.keys):
            raise ForeignSignature(
                f"{where} is signed by no key that is trusted here ({self._names}), or is not as it was signed. "
                "Nothing was written; find out who wrote it before you trust another key."
            )
        if head.digest_kind != SIGNED_DIGEST:
            raise NotTrusted(
                f"{where} is signed over {head.digest_kind} digests, which an enemy can forge. Nothing was written; "
                f"publish with digest {SIGNED_DIGEST}."
            )

    def check_age(self, newest: Manifest, now_ns: int) -> None:
        """Whether the newest version that a store shows is new enough. Raises Frozen."""
        if self.max_age_seconds is None:
            return
        age = (now_ns - newest.created_ns) / 1e9
        if age > self.max_age_seconds:
            raise Frozen(
                f"the newest version that the store shows, {newest.version}, is {age:.0f} s old, and at most "
                f"{self.max_age_seconds:.0f} s are allowed: somebody may hold newer ones back, or the trainer rests. "
                "Nothing was written; what is served stays. Look at the trainer, or allow a greater age."
            )
        if age < -max(self.max_age_seconds, _FUTURE_SECONDS):
            raise Frozen(
                f"version {newest.version} was made {-age:.0f} s after now, by this machine's clock: its age means "
                "nothing. Nothing was written; set the clocks."
            )

    @property
    def _names(self) -> str:
        return ", ".join(key.name for key in self.keys)


def make_key(path: Path, *, disk: Disk) -> PublicKey:
    """Makes a key pair: `path` (PKCS#8 PEM, 0600) and `path`.pub (PEM). Raises UsageError when one of them is there."""
    public_path = path.with_name(path.name + ".pub")
    for there in (path, public_path):
        if there.exists() or there.is_symlink():
            raise UsageError(f"{there} is there already. Nothing was made; a key is never overwritten.")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder. Nothing was made.")
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    disk.write_atomic(path, secret, mode=PRIVATE_FILE)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    disk.write_atomic(public_path, public, mode=SHARED_FILE)
    return Signer(key).public


def read_signer(path: Path) -> Signer:
    """The private key in a file that only its owner can read. Raises UsageError."""
    data = _read(path, private=True)
    if b"PUBLIC KEY" in data:
        raise UsageError(
            f"{path} is a public key: hosts trust it (`--trust`), and the trainer signs with the private one beside "
            "it. Nothing was started."
        )
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path} is no private key that can be read here ({type(error).__name__}). Nothing was started; "
            "`weighbridge keygen` makes one."
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no Ed25519 key; `weighbridge keygen` makes one. Nothing was started.")
    return Signer(key)


def read_trust(paths: Iterable[Path], *, max_age_seconds: float | None = None) -> Trust:
    """Trust in the public keys of some files. Raises UsageError."""
    return Trust(tuple(_read_public(path) for path in paths), max_age_seconds)


def _read_public(path: Path) -> PublicKey:
    data = _read(path, private=False)
    if b"PRIVATE KEY" in data:
        raise UsageError(
            f"{path} is a private key: it stays with the trainer (`--sign`), and hosts trust the public one, "
            f"{path.name}.pub. Nothing was started."
        )
    try:
        key = load_pem_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{path} is no public key that can be read here ({type(error).__name__}). Nothing was started; "
            "`weighbridge keygen` makes one."
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no Ed25519 key; `weighbridge keygen` makes one. Nothing was started.")
    return PublicKey(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _read(path: Path, *, private: bool) -> bytes:
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(_MOST_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}. Nothing was started.") from error
    if private and stat.S_IMODE(mode) & 0o077 and b"PUBLIC KEY" not in data:
        raise UsageError(f"{path} can be read by others than its owner: chmod 600 it. Nothing was started.")
    return data
