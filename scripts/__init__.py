"""Programs, each `python -m scripts.NAME`, and their parts."""

import sys
from pathlib import Path

from conf.interrupt import before_imports

if sys.argv[:1] == ["-m"]:  # what argv[0] is while `python -m` still looks for the module to run
    before_imports()
    asked = sys.orig_argv[-len(sys.argv)].rpartition("scripts.")[2]
    file = Path(__file__).parent / (asked.replace(".", "/") + ".py")
    if file.is_file() and '__name__ == "__main__"' not in file.read_text(encoding="utf-8"):
        from conf.mistakes import fail

        sys.exit(fail(f"scripts.{asked} is a part of programs and none itself; scripts/README.md lists them"))
