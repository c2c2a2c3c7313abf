"""A training loop that publishes after each step: `python examples/plain_loop.py STORE BASE [HOST ...]`.

BASE is the folder that version 0 is (it is written if there is none); on each HOST a `weighbridge host` runs.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from weighbridge import WeightSync


def main(store: str, base: Path, hosts: list[str]) -> None:
    """Three steps of a tiny model."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    if not base.exists():
        base.mkdir(parents=True)
        save_file(model.state_dict(), base / "model.safetensors")
        (base / "config.json").write_text('{"model_type": "tiny"}')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Hosts may lag one version behind the trainer: a push waits for those that are further behind.
    with WeightSync(store, base, hosts, allowed_staleness=1) as sync:
        sync.warm()
        for step in range(3):
            loss = model(torch.randn(64, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pending = sync.push(model, labels={"step": step, "loss": loss.item()}, wait=False)
            print(f"step {step}: version {pending.version} on its way")
        result = pending.result()
        print(f"version {result.version} {result.outcome}, {result.wire_bytes} bytes for {result.model_bytes}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
