"""Trains the demo's model: a bounded pre-training that makes the base, then RL-like steps at RL's small learning rates.

fp32 masters under AdamW, exported as bf16. Knows nothing of stores, hosts or flows.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from weighbridge.demo.corpus import Corpus
from weighbridge.demo.export import write_checkpoint
from weighbridge.demo.model import Decoder, sample
from weighbridge.demo.shape import DecoderShape


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How the demo trains. Sizes are sequences and bytes (one byte is one token), rates are AdamW's."""

    batch: int = 2
    window: int = 64
    rate: float = 1e-3
    warm_up_steps: int = 5
    rl_rate: float = 2e-6
    prompts: int = 3
    samples: int = 4
    prompt_bytes: int = 24
    new_bytes: int = 24
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class PretrainReport:
    """What pre-training did. Losses are nats a byte on text that was held out, before and after."""

    steps: int
    seen_bytes: int
    loss_before: float
    loss_after: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One RL-like step. `loss` is the policy-gradient objective, whose size means little by itself.

    `reward` is the mean over the sampled continuations, 0 to 1. `density` is the share of bf16 elements that changed.
    """

    step: int
    loss: float
    reward: float
    density: float
    seconds: float


@contextmanager
def _one_core_spared() -> Iterator[None]:
    # Hosts, server and kernels share this machine, and an operation split over all cores waits, spinning, for the
    # slowest of them: on 2 busy cores, two threads took 3 times the CPU of one and twice as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Trainer:
    """Owns the fp32 masters and the optimizer. The same seed, corpus and number of steps give the same weights."""

    def __init__(
        self, corpus: Corpus, *, shape: DecoderShape | None = None, plan: TrainingPlan | None = None, seed: int = 0
    ) -> None:
        self.shape = shape or DecoderShape()
        self.plan = plan or TrainingPlan()
        self.model = Decoder(self.shape, seed=seed)
        self._corpus = corpus
        self._train = torch.from_numpy(corpus.train.copy())
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.plan.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._steps = 0

    @_one_core_spared()
    def pretrain(
        self, *, seconds: float, most_steps: int = 1000, on_step: Callable[[int, float], None] | None = None
    ) -> PretrainReport:
        """Next-byte training until `seconds` or `most_steps` are over; `on_step` hears each step's number and loss."""
        before = self.held_out_loss()
        start = time.monotonic()
        step = 0
        while step < most_steps and (spent := (time.monotonic() - start) / seconds) < 1.0:
            self._set_rate(self._pretraining_rate(step, done=max(spent, step / most_steps)))
            loss = self._next_byte_loss(self._windows(self.plan.batch, self.plan.window + 1))
            self._descend(loss)
            step += 1
            if on_step is not None:
                on_step(step, float(loss.detach()))
        elapsed = time.monotonic() - start
        self._forget_momentum()
        return PretrainReport(
            steps=step,
            seen_bytes=step * self.plan.batch * self.plan.window,
            loss_before=before,
            loss_after=self.held_out_loss(),
            seconds=elapsed,
        )

    @_one_core_spared()
    def step(self) -> StepReport:
        """One RL-like step: sample continuations, reward their likeness to the corpus, follow the policy gradient.

        The advantage is the reward against the other samples of the same prompt, in their standard deviations
        (GRPO, arXiv 2402.03300, without ratio and KL term: one on-policy step a batch needs neither).
        """
        start = time.monotonic()
        old = self.state()
        self._set_rate(self.plan.rl_rate)
        loss, reward = self._policy_gradient_loss()
        self._descend(loss)
        self._steps += 1
        return StepReport(
            step=self._steps,
            loss=float(loss.detach()),
            reward=reward,
            density=_density(old, self.state()),
            seconds=time.monotonic() - start,
        )

    def state(self) -> dict[str, Tensor]:
        """The bf16 export: HF names to new tensors that later steps do not touch."""
        return {name: weight.detach().to(torch.bfloat16) for name, weight in self.model.named_parameters()}

    def export(self, folder: Path) -> None:
        """Writes the bf16 export as a HF checkpoint folder."""
        write_checkpoint(folder, self.state(), self.shape)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats a byte on the first windows of the held-out text; the same ones at each call."""
        size = self.plan.window + 1
        count = min(16, len(self._corpus.held_out) // size)
        ids = torch.from_numpy(self._corpus.held_out[: count * size].astype(np.int64)).view(count, size)
        return float(self._next_byte_loss(ids))

    def _policy_gradient_loss(self) -> tuple[Tensor, float]:
        plan = self.plan
        prompts = self._windows(plan.prompts, plan.prompt_bytes).repeat_interleave(plan.samples, dim=0)
        drawn = sample(self.model, prompts, tokens=plan.new_bytes, generator=self._generator)
        rewards = torch.tensor([self._corpus.likeness(row.numpy().astype(np.uint8)) for row in drawn])
        groups = rewards.view(plan.prompts, plan.samples)
        spread = groups.std(dim=1, keepdim=True, correction=0)
        advantage = ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)).view(-1, 1)
        logits = self.model(torch.cat((prompts, drawn[:, :-1]), dim=1))[:, plan.prompt_bytes - 1 :, :256]
        likelihood = logits.log_softmax(dim=-1).gather(2, drawn.unsqueeze(2)).squeeze(2)
        return -(advantage * likelihood).mean(), float(rewards.mean())

    def _next_byte_loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def _windows(self, count: int, size: int) -> Tensor:
        starts = torch.randint(len(self._train) - size + 1, (count, 1), generator=self._generator)
        return self._train[starts + torch.arange(size)].long()

    def _descend(self, loss: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self._optimizer.step()

    def _pretraining_rate(self, step: int, *, done: float) -> float:
        """Linear warm-up, then linear decay to a tenth over what is left of the time or the steps."""
        return self.plan.rate * min(1.0, (step + 1) / self.plan.warm_up_steps) * (1.0 - 0.9 * done)

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _forget_momentum(self) -> None:
        # The objective changes here. Adam's second moment still tells each weight's scale, so RL starts warm; its first
        # moment would drag the first RL steps along the old objective.
        for moments in self._optimizer.state.values():
            moments["exp_avg"].zero_()


def _density(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in new)
    return changed / sum(tensor.numel() for tensor in new.values())
