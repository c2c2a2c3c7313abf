"""What the demo needs of an engine, and what it says of one."""

from pathlib import Path

import pytest

from weighbridge.demo.engine import Said, find_vllm, told
from weighbridge.errors import UsageError


def test_without_a_vllm_the_demo_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no vLLM was found.*--engine-python.*make .venv-vllm/.ready"):
        find_vllm(None)
    with pytest.raises(UsageError, match=r"nowhere/python"):
        find_vllm(Path("nowhere/python"))


def test_a_vllm_is_found_here_or_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("python", "vllm"):
        (tmp_path / name).write_text("#!/bin/sh")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_vllm(None) == tmp_path / "python"
    here = tmp_path / ".venv-vllm" / "bin" / "python"
    here.parent.mkdir(parents=True)
    here.symlink_to(tmp_path / "python")
    assert find_vllm(None) == here


def test_what_moved_is_told_and_tokens_where_they_changed() -> None:
    before, now = Said(-30.0, (1, 2, 3), "abc"), Said(-29.5, (1, 2, 3), "abc")
    assert told(before, None) == "vLLM on host-0: log p(text) = -30.00000; greedy after it: 'abc'"
    assert told(now, before) == "vLLM on host-0: log p(text) = -29.50000 (+0.50000); the same 3 greedy tokens"
    assert told(Said(-29.5, (1, 4, 3), "adc"), before).endswith("differ from number 2 on: 'adc'")
