"""docs/OPERATIONS.md says commands that work as they are written, in their order, in a fresh folder and home."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoints import tiny_weights, trained, write_checkpoint

from weighbridge.flows.server import stop_server

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fresh_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="weighbridge-home-"))  # short: a socket of PostgreSQL lies in it
    try:
        yield folder
    finally:
        for state in folder.glob(".local/state/weighbridge/*"):
            stop_server(state)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.fleet
@pytest.mark.timeout(900)
def test_the_commands_of_set_up_in_ten_minutes_work_as_written(tmp_path: Path, fresh_home: Path) -> None:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text()
    section = text.partition("## Set up in ten minutes")[2].partition("\n## ")[0]
    yours, *commands = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert len(commands) == 3
    weights, folder = tiny_weights(), tmp_path / "empty"
    folder.mkdir()
    places = {"BASE": weights, "STEP_10": trained(weights, 1), "STEP_20": trained(trained(weights, 1), 2)}
    paths = {name: str(write_checkpoint(tmp_path / name, one)) for name, one in places.items()}
    written = "\n".join([re.sub(r"(?<=[ =])(\w+)=/[\w/.-]+", lambda m: f"{m[1]}={paths[m[1]]}", yours), *commands])
    assert all(path in written for path in paths.values())
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "WEIGHBRIDGE_", "XDG_"))}
    environment = {
        **kept,
        "HOME": str(fresh_home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "WEIGHBRIDGE_THREADS": "1",
    }
    script = tmp_path / "as-written.sh"
    script.write_text(f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{written}")
    done = subprocess.run(
        ["bash", "-eu", str(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{logs}"
    assert "version 2: complete" in done.stdout
    assert done.stdout.rstrip().endswith("stopped")
    assert list(fresh_home.glob(".local/state/weighbridge/*/server.log"))
