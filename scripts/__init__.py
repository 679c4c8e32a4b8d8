"""Programs, each `python -m scripts.NAME`, and their parts."""

import sys

from conf.interrupt import leave_quietly

PARTS = {  # modules that are no program -> one that they are of
    "causality": "doctor",
    "cluster": "doctor",
    "machine": "doctor",
    "selftest": "doctor",
    "evidence_tables": "evidence",
    "parity_verdict": "parity",
    "variants": "parity",
    "mosaicbert": "bench.mosaicbert",
    "bench.calls": "bench.attention",
    "bench.clock": "bench.attention",
    "bench.report": "bench.attention",
    "bench.kernel_plans": "bench.compile_kernels",
    "bench.mask_table": "bench.masks",
    "bench.opponents": "bench.time_to_loss",
    "bench.processes": "bench.parallel",
    "bench.saving": "bench.training",
}

if sys.argv[:1] == ["-m"]:  # Python looks for a module of ours to run, and sets the first argument once it has it
    leave_quietly()
    asked = sys.orig_argv[-len(sys.argv)].rpartition("scripts.")[2]
    if asked in PARTS:
        from conf.mistakes import fail

        sys.exit(fail(f"scripts.{asked} is no program; use one that it is a part of: python -m scripts.{PARTS[asked]}"))
