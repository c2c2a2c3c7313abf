"""The demo's model, text and trainer at toy sizes: what it exports is a real HF checkpoint, and training is real."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from weighbridge.demo import tokenizer
from weighbridge.demo.corpus import Corpus, read_corpus
from weighbridge.demo.model import Decoder, KeyValues, sample
from weighbridge.demo.shape import DecoderShape
from weighbridge.demo.trainer import PretrainReport, Trainer, TrainingPlan
from weighbridge.errors import UsageError

Pretrained = tuple[Trainer, PretrainReport, list[tuple[int, float]]]
TOY = DecoderShape(hidden=32, layers=2, heads=4, key_value_heads=2, head_dim=16, intermediate=64)
PLAN = TrainingPlan(batch=4, window=32, rate=3e-3, prompts=2, samples=3, prompt_bytes=8, new_bytes=8)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Toy matrices gain nothing from threads, and on a busy machine every operation would wait for the slowest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus(200_000)


@pytest.fixture(scope="module")
def pretrained(corpus: Corpus) -> Pretrained:
    """A trainer after 60 steps, its report, and what it said on the way. Tests change copies of the trainer only."""
    heard: list[tuple[int, float]] = []
    trainer = Trainer(corpus, shape=TOY, plan=PLAN, seed=7)
    report = trainer.pretrain(seconds=600, most_steps=60, on_step=lambda step, loss: heard.append((step, loss)))
    return trainer, report, heard


@pytest.fixture
def trainer(corpus: Corpus) -> Trainer:
    return Trainer(corpus, shape=TOY, plan=PLAN, seed=7)


def test_every_tensor_has_the_name_and_shape_that_the_config_implies(trainer: Trainer) -> None:
    assert {name: tuple(t.shape) for name, t in trainer.state().items()} == TOY.tensors()


def test_the_default_shape_has_about_25_million_parameters() -> None:
    shape = DecoderShape()
    assert 24e6 < sum(math.prod(size) for size in shape.tensors().values()) < 26e6
    assert shape.head_dim == 64
    assert shape.config_json()["tie_word_embeddings"] is False


def test_an_export_is_a_folder_whose_tensors_equal_the_state(trainer: Trainer, tmp_path: Path) -> None:
    trainer.export(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "base" / "model.safetensors", framework="pt") as file:
        state = trainer.state()
        assert set(file.keys()) == set(state)
        for name, tensor in state.items():
            assert file.get_tensor(name).dtype == torch.bfloat16
            assert torch.equal(file.get_tensor(name), tensor)


def test_the_tokenizer_files_cover_every_byte_by_its_own_number(trainer: Trainer, tmp_path: Path) -> None:
    trainer.export(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = written["model"]["vocab"]
    alphabet = tokenizer.byte_alphabet()
    assert len(set(alphabet.values())) == 256
    assert [vocabulary[alphabet[byte]] for byte in range(256)] == list(range(256))
    assert sorted(vocabulary.values()) == list(range(TOY.vocabulary))
    assert written["model"]["merges"] == []
    # Stand-ins that every HF byte-level vocabulary agrees on: one of each run of bytes, and both edges of the last.
    stand_ins = {0x61: "a", 0x0A: "\u010a", 0x20: "\u0120", 0x7F: "\u0121", 0xA0: "\u0142", 0xAD: "\u0143"}
    assert {byte: alphabet[byte] for byte in stand_ins} == stand_ins
    special = {entry["content"]: entry["id"] for entry in written["added_tokens"]}
    config = json.loads((tmp_path / "config.json").read_text())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for role in ("pad", "bos", "eos"):
        assert special[settings[f"{role}_token"]] == config[f"{role}_token_id"]


def test_pretraining_lowers_the_loss_on_text_that_was_held_out(
    pretrained: Pretrained,
) -> None:
    trainer, report, heard = pretrained
    assert report.steps == len(heard) == 60
    assert report.loss_before == pytest.approx(math.log(TOY.vocabulary), abs=0.1)
    assert report.loss_after < report.loss_before - 1.0
    assert report.loss_after == trainer.held_out_loss()


def test_pretraining_ends_when_its_time_is_over(trainer: Trainer) -> None:
    assert trainer.pretrain(seconds=1e-9, most_steps=50).steps < 50


def test_a_step_changes_some_elements_and_reports_their_share(
    pretrained: Pretrained,
) -> None:
    trainer = copy.deepcopy(pretrained[0])
    for number in (1, 2):
        before = trainer.state()
        report = trainer.step()
        after = trainer.state()
        changed = sum(int((before[n].view(torch.int16) != after[n].view(torch.int16)).sum()) for n in after)
        assert report.step == number
        assert report.density == changed / sum(t.numel() for t in after.values())
        assert 0 < report.density < 0.2
        assert 0 <= report.reward <= 1
        assert math.isfinite(report.loss)


def test_rewarded_continuations_become_likelier(
    pretrained: Pretrained,
) -> None:
    trainer = copy.deepcopy(pretrained[0])
    trainer.plan = replace(PLAN, rl_rate=3e-3, prompts=4, samples=8)
    rewards = [trainer.step().reward for _ in range(30)]
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1


def test_the_same_seed_and_steps_give_the_same_weights(corpus: Corpus) -> None:
    def weights() -> dict[str, torch.Tensor]:
        trainer = Trainer(corpus, shape=TOY, plan=PLAN, seed=3)
        trainer.step()
        return trainer.state()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_trainer_leaves_the_global_random_state_alone(corpus: Corpus) -> None:
    before = torch.random.get_rng_state()
    Trainer(corpus, shape=TOY, plan=PLAN).step()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_spares_a_core_and_gives_it_back(corpus: Corpus) -> None:
    threads = torch.get_num_threads()
    heard: list[int] = []
    torch.set_num_threads(2)
    try:
        trainer = Trainer(corpus, shape=TOY, plan=PLAN)
        trainer.pretrain(seconds=60, most_steps=1, on_step=lambda step, loss: heard.append(torch.get_num_threads()))
        assert (heard, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(threads)


def test_decoding_token_by_token_gives_the_logits_of_one_pass() -> None:
    model = Decoder(TOY, seed=1)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(ids)
        seen = [KeyValues() for _ in range(TOY.layers)]
        pieces = [model(ids[:, :4], seen, 0), *(model(ids[:, i : i + 1], seen, i) for i in range(4, 9))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-6)


def test_samples_are_bytes_and_their_own_for_each_seed() -> None:
    model = Decoder(TOY, seed=1)
    prompts = torch.zeros((3, 2), dtype=torch.long)
    first, again, other = (
        sample(model, prompts, tokens=20, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert first.shape == (3, 20)
    assert int(first.max()) < 256
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_corpus_is_bounded_and_the_same_each_time(corpus: Corpus) -> None:
    assert len(corpus.train) + len(corpus.held_out) == 200_000
    assert np.array_equal(read_corpus(200_000).train, corpus.train)


def test_likeness_is_the_share_of_runs_that_the_corpus_has() -> None:
    corpus = Corpus.of(b"abcd" * 2000)
    as_text = [np.frombuffer(text, dtype=np.uint8) for text in (b"cdabc", b"zzzzz", b"abcxd", b"ab")]
    assert [corpus.likeness(text) for text in as_text] == [1.0, 0.0, pytest.approx(1 / 3), 0.0]


def test_a_python_without_sources_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="standard library"):
        read_corpus(folder=tmp_path)


def test_the_demo_package_and_its_numbers_load_no_torch() -> None:
    code = "import sys, weighbridge.demo.corpus, weighbridge.demo.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
