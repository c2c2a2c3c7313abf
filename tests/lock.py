"""Writes requirements.lock anew from constraints.txt: `make lock`, after a constraint was added or moved. Asks pip
which wheels it would take, and for their hashes (it reads each of them, so some minutes); installs nothing. Given up
after LOCK_SECONDS=900, with requirements.lock as it was."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# Everything in constraints.txt but torch, with the sha256 of the wheel that pip takes on Python 3.11 for Linux x86-64.
# `pip install --require-hashes --no-deps -r requirements.lock`, after torch, whose builds differ by machine.
"""


def main() -> None:
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(("#", "torch=="))
    ]
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder, "asked.txt"), Path(folder, "report.json")
        asked.write_text("\n".join(lines) + "\n")
        words = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", *words, "--timeout", "20", "--report", report, "-r", asked]
        seconds = float(os.environ.get("LOCK_SECONDS", "900"))
        try:
            subprocess.run(command, check=True, timeout=seconds)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            how = f"was not done within {seconds:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else "failed"
            sys.exit(
                f"pip {how}; its last lines say at which package. requirements.lock is as it was: try again once the "
                "index answers, or with a larger LOCK_SECONDS."
            )
        found = json.loads(report.read_text())["install"]
    pins = [
        f"{re.sub('[-_.]+', '-', one['metadata']['name']).lower()}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}\n"
        for one in found
    ]
    (ROOT / "requirements.lock").write_text(HEAD + "".join(sorted(pins)))


if __name__ == "__main__":
    main()
