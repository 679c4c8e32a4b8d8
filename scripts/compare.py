"""Compare runs in one picture and table: `python -m scripts.compare RUN [RUN ...] [out=FILE.png]`.

A RUN is the folder of a run (finished, running or killed), or a folder of a sweep or a name, which stands for all runs
in it. Only `metrics.jsonl`, `summary.json` and `config.yaml` are read. The picture has training and validation loss
against steps, tokens and the time of the training steps, without start-up, compilation, evaluation and saving. The
table has each run's training loss at the last point that all runs have reached, by each of these three measures, and
where each run is now. The last line is one JSON object.
"""

import json
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from conf.program import program
from training.comparison import compare, runs_below


@dataclass
class CompareSettings:
    runs: list[str] = field(default_factory=list)  # folders of runs or sweeps; `runs=` may be left out
    out: str = "runs/compare.png"  # picture to write

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs=[] names none; give the folders of runs (runs/<experiment>/<time>)")
        if "" in self.runs:
            raise ValueError("a run without a name would be all that are here; give its folder, or . for this one")
        if not Path(self.out).name:
            raise ValueError(f"out={self.out} names no picture; use out=runs/compare.png")


@program("tool", CompareSettings, positional="runs")
def main(settings: CompareSettings, run_dir: Path) -> None:
    folders = {realpath(run): run for folder in settings.runs for run in runs_below(Path(folder))}  # each once
    print(json.dumps(compare(list(folders.values()), Path(settings.out))))


if __name__ == "__main__":
    main()
