"""Every tile of the tuning table compiles, and fits, for GPUs that need not be here. `pytest -m slow` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_entry_of_the_table_compiles_and_fits(arch):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.compile_kernels", "--arch", str(arch), "--every-entry"],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == 0
    assert summary["compiled"] >= 30
