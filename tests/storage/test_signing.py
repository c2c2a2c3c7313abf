"""Keys and signed manifests: who is believed, to the bit as docs/FORMAT.md says it, and what keys never leak."""

import pickle
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tests.checkpoints import tiny_weights, trained
from tests.storage.manifests import some_anchor, some_manifest
from tests.storage.publishing import Run, push

from weighbridge.errors import ForeignSignature, Frozen, NotTrusted, Replayed, Unsigned, UsageError
from weighbridge.storage.audit.audit import audit
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import from_bytes, manifest_key, to_bytes
from weighbridge.storage.signing import Signer, Trust, make_key, read_signer, read_trust


def keys(folder: Path, name: str = "key") -> tuple[Signer, Trust]:
    make_key(folder / name, disk=LocalDisk("process"))
    return read_signer(folder / name), read_trust([folder / f"{name}.pub"])


def signed_manifest(signer: Signer) -> bytes:
    row = some_manifest().rows[0]
    digests = {"before": b"\x01" * 32, "after": b"\x02" * 32, "tensor_digest": b"\x02" * 32}
    shards = tuple(replace(shard, digest=b"\x03" * 32) for shard in some_manifest().shards)
    return to_bytes(some_manifest(digest_kind="blake3", rows=(replace(row, **digests),), shards=shards), signer=signer)[
        0
    ]


def test_a_signature_is_over_the_bytes_with_both_fields_zeroed_as_the_format_says(tmp_path: Path) -> None:
    signer, _ = keys(tmp_path)
    data = signed_manifest(signer)
    manifest = from_bytes(data)
    zeroed = data.replace(manifest.signature.encode(), b"0" * 128).replace(manifest.digest.encode(), b"0" * 64)
    assert blake3.blake3(zeroed).hexdigest() == manifest.digest
    Ed25519PublicKey.from_public_bytes(signer.public.raw).verify(bytes.fromhex(manifest.signature), zeroed)
    assert signer.public.name == blake3.blake3(signer.public.raw).hexdigest()[:16]


def test_only_what_a_trusted_key_signed_is_believed(tmp_path: Path) -> None:
    (signer, trust), (other, others) = keys(tmp_path), keys(tmp_path, "other")
    data = signed_manifest(signer)
    assert from_bytes(data, trust=trust) == from_bytes(data)
    assert from_bytes(data, trust=Trust((*others.keys, *trust.keys))).version == 12
    with pytest.raises(ForeignSignature):
        from_bytes(signed_manifest(other), trust=trust)
    with pytest.raises(Unsigned):
        from_bytes(to_bytes(some_manifest())[0], trust=trust)
    with pytest.raises(NotTrusted, match="forge"):
        from_bytes(to_bytes(some_manifest(), signer=signer)[0], trust=trust)
    assert from_bytes(to_bytes(some_anchor())[0], trust=trust).kind == "anchor"


def test_a_changed_signature_is_no_signature_even_if_the_digest_still_fits(tmp_path: Path) -> None:
    signer, trust = keys(tmp_path)
    data = signed_manifest(signer)
    signature = from_bytes(data).signature
    swapped = signature[:10] + ("0" if signature[10] != "0" else "1") + signature[11:]
    with pytest.raises(ForeignSignature):
        from_bytes(data.replace(signature.encode(), swapped.encode()), trust=trust)


def test_an_age_is_judged_by_both_clocks(tmp_path: Path) -> None:
    _, trust = keys(tmp_path)
    newest = some_manifest(created_ns=1_000 * 10**9)
    Trust(trust.keys).check_age(newest, 10**18)
    limited = Trust(trust.keys, 60)
    limited.check_age(newest, 1_050 * 10**9)
    limited.check_age(newest, 900 * 10**9)
    for now in (1_100, 100):
        with pytest.raises(Frozen):
            limited.check_age(newest, now * 10**9)


def test_a_key_is_made_once_for_its_owner_alone_and_shown_to_nobody(tmp_path: Path) -> None:
    signer, _ = keys(tmp_path)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="never overwritten"):
        make_key(tmp_path / "key", disk=LocalDisk("process"))
    assert repr(signer) == f"Signer({signer.public.name})"
    with pytest.raises(TypeError):
        pickle.dumps(signer)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_signer(tmp_path / "key")
    with pytest.raises(UsageError, match="is a public key"):
        read_signer(tmp_path / "key.pub")
    with pytest.raises(UsageError, match="is a private key"):
        read_trust([tmp_path / "key"])
    (tmp_path / "text").write_text("-----BEGIN NOTHING-----")
    (tmp_path / "text").chmod(0o600)
    for name, why in (("gone", "cannot be read"), ("text", "weighbridge keygen")):
        with pytest.raises(UsageError, match=why):
            read_signer(tmp_path / name)
        with pytest.raises(UsageError, match=why):
            read_trust([tmp_path / name])


def test_a_signed_run_is_published_followed_and_audited_by_its_keys_alone(tmp_path: Path) -> None:
    (signer, trust), (other, others) = keys(tmp_path), keys(tmp_path, "other")
    run, weights = Run(tmp_path), tiny_weights()
    publisher = run.open(signer=signer, digest_kind="blake3")
    for version in (1, 2):
        weights = trained(weights, version)
        push(publisher, weights)
    lineage = Lineage(run.store, trust=trust)
    assert [manifest.version for manifest in lineage.chain(0, 2)] == [1, 2]
    assert audit(run.store, trust=trust).ok
    assert not audit(run.store, trust=others).ok
    assert run.open(signer=signer, digest_kind="blake3").version == 2
    with pytest.raises(NotTrusted):
        run.open(signer=other, digest_kind="blake3")
    taken_over = run.open(signer=other, digest_kind="blake3", trust=Trust((*trust.keys, *others.keys)))
    assert push(taken_over, trained(weights, 3)).version == 3
    found = audit(run.store, trust=trust)
    assert found.findings[0].key == manifest_key(3)
    with pytest.raises(ForeignSignature):
        lineage.manifest(3)


def test_who_forgets_the_key_of_a_signed_run_publishes_nothing(tmp_path: Path) -> None:
    """One unsigned version would end the run for every host that trusts its key."""
    signer, trust = keys(tmp_path)
    run = Run(tmp_path)
    run.open(signer=signer, digest_kind="blake3")
    for options in ({}, {"digest_kind": "blake3"}, {"trust": trust}):
        with pytest.raises(UsageError, match="is signed"):
            run.open(**options)
    assert Lineage(run.store, trust=trust).head() == 0
    push(run.open(signer=signer, digest_kind="blake3"), trained(tiny_weights(), 1))
    assert Lineage(run.store, trust=trust).head() == 1


def test_a_manifest_of_another_version_is_a_replay(tmp_path: Path) -> None:
    signer, trust = keys(tmp_path)
    run = Run(tmp_path)
    publisher = run.open(signer=signer, digest_kind="blake3")
    push(publisher, trained(tiny_weights(), 1))
    run.store.create(manifest_key(2), run.store.get(manifest_key(1)))
    with pytest.raises(Replayed):
        Lineage(run.store, trust=trust).manifest(2)


def test_a_run_with_forgeable_digests_is_not_signed(tmp_path: Path) -> None:
    signer, _ = keys(tmp_path)
    run = Run(tmp_path)
    run.open()
    with pytest.raises(UsageError, match="forge"):
        run.open(signer=signer)
