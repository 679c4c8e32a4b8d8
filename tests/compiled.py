"""What the kernels compile to, asked of a process of its own: one that interprets kernels cannot compile them."""

import json
import os
import subprocess
import sys
from pathlib import Path


def compiled(*arguments: str) -> dict:
    """The last line of `python -m scripts.bench.compile_kernels ARGUMENTS`; its exit code must be 0."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.compile_kernels", "workers=1", *arguments],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
