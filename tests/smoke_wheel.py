"""Smoke test of an installed wheel, run from outside the checkout: a version crosses through Prefect and back from the
store, by the installed package and its command alone. Prints what it did; exits with 1 when something is not right."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import weighbridge
from weighbridge import WeightSync

CHECKOUT = Path(__file__).resolve().parents[1]


def run(*words: str) -> str:
    """One `weighbridge` command of this environment; returns what it printed."""
    command = [str(Path(sys.executable).with_name("weighbridge")), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """The smoke test."""
    package = Path(weighbridge.__file__).resolve()
    assert (CHECKOUT / "src") not in package.parents, f"{package} is the checkout, not the wheel"
    with tempfile.TemporaryDirectory(prefix="weighbridge-smoke-") as name:
        folder = Path(name)
        os.environ["WEIGHBRIDGE_HOME"] = str(folder / "home")
        rng = np.random.default_rng(0)
        weights = {"a.weight": rng.standard_normal((64, 64)).astype(np.float16), "b.weight": np.ones(3, np.float32)}
        (folder / "base").mkdir()
        save_file(weights, folder / "base" / "model.safetensors")
        weights["a.weight"][::7] += np.float16(0.5)
        store, base, replica = (str(folder / part) for part in ("store", "base", "replica"))
        try:
            with WeightSync(store, base) as sync:
                assert sync.push(weights, labels={"from": "smoke"}).version == 1
        finally:
            run("server", "stop")
        run("pull", "--store", store, "--base", base, "--replica", replica)
        run("verify", replica, "--store", store)
        newest = json.loads(run("log", "--store", store, "--json").splitlines()[0])
        assert (newest["version"], newest["labels"]) == (1, {"from": "smoke"}), newest
        found = load_file(folder / "replica" / "current" / "model.safetensors")
        assert all(found[key].tobytes() == array.tobytes() for key, array in weights.items())
    sys.stdout.write(f"wheel {weighbridge.__version__} at {package.parent}: a version crossed. 1 passed, 0 failed\n")


if __name__ == "__main__":
    main()
