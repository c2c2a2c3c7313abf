"""Keys as people use them: made by `keygen`, trusted by every command that reads versions."""

from pathlib import Path

import pytest
from tests.checkpoints import tiny_weights, trained
from tests.front.test_audit_command import code
from tests.storage.publishing import Run, push

from weighbridge.errors import UsageError
from weighbridge.settings import load_settings
from weighbridge.storage.signing import read_signer


def test_every_command_that_reads_versions_believes_only_trusted_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("KEY", "OTHER"):
        assert code("keygen", tmp_path / name) == 0
    assert code("keygen", tmp_path / "KEY") == 2
    run = Run(tmp_path)
    signer = read_signer(tmp_path / "KEY")
    push(run.open(signer=signer, digest_kind="blake3"), trained(tiny_weights(), 1))
    capsys.readouterr()
    for number, words in enumerate(
        (
            ("pull", "--base", run.base, "--replica", tmp_path / "R"),
            ("verify", 1),
            ("checkout", 1, tmp_path / "OUT", "--base", run.base),
            ("audit",),
        )
    ):
        for key, expected in (("OTHER.pub", 9 if words[0] == "audit" else 16), ("KEY.pub", 0)):
            assert code(*words, "--store", run.store.url, "--trust", tmp_path / key) == expected, (number, key)
            said = capsys.readouterr()
            assert expected == 0 or "signed by no key that is trusted here" in said.err


def test_settings_that_trust_cannot_go_with_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ({"allowed_age": 60.0}, {"sign": "KEY", "digest": "xxh3-128"}):
        with pytest.raises(UsageError, match="Nothing was started"):
            load_settings(wrong)
    assert load_settings({"sign": "KEY"}).digest_kind == "blake3"
