"""Tokenize a text ahead of a run; where that is done already, check every file.

    python -m scripts.prepare data=wikitext103 tokenizer=gpt2
    python -m scripts.prepare data=text data.files='books/*.txt' tokenizer=gpt2
    python -m scripts.prepare data=wikitext2 data.local_dir=wikitext-2

Takes the arguments of train.py; only data and tokenizer matter. The last line is one JSON object.
"""

import json
from dataclasses import replace
from pathlib import Path

from conf.program import program
from conf.schema import Settings
from data import Dataset, open_dataset


@program("config", Settings, experiment="quickstart", run_dir=".")
def main(settings: Settings, run_dir: Path) -> None:
    data = replace(settings.data, seq_len=1)  # a text shorter than a run's window can be prepared all the same
    print(json.dumps(summary(open_dataset(data, settings.tokenizer, report=print))))


def summary(dataset: Dataset) -> dict:
    counts = {
        split: {key: count for key, count in facts.items() if key != "shards"}
        for split, facts in dataset.manifest["splits"].items()
    }
    return {"path": str(dataset.path), "fingerprint": dataset.fingerprint, "splits": counts}


if __name__ == "__main__":
    main()
