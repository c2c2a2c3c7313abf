"""transformers' `Trainer` with a callback that publishes: `python transformers_trainer.py STORE BASE [HOST ...]`.

TRL's trainers take the same callback. A tiny Llama with random weights stands for yours; BASE is written if there is
none.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from weighbridge import WeightSync
from weighbridge.trainers import PushCallback


def main(store: str, base: Path, hosts: list[str]) -> None:
    """Four steps, a version each."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    if not base.exists():
        model.save_pretrained(base)
    tokens = [torch.randint(0, 64, (12,)) for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(base.parent / "trainer"), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with WeightSync(store, base, hosts, allowed_staleness=1) as sync:
        callback = PushCallback(sync)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[callback],
        )
        trainer.train()
        print(f"version {callback.version} stands for step {trainer.state.global_step}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
