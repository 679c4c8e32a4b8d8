"""What a run is made of: one dataclass a group, each owned by the module that reads it, composed here.

YAML keys, dataclass fields and the README use the same words. Nothing below `train.py` sees OmegaConf.
"""

import json
from dataclasses import asdict, dataclass, field
from itertools import chain

from conf.keys import is_folder_name
from data import DataConfig, check_tokenizer
from model import GPTConfig
from training.comparison import flat
from training.hardware import HardwareConfig
from training.optimizer import OptimConfig
from training.parallel import ALONE, ParallelConfig
from training.run import TrainConfig
from training.wandb_run import LoggerConfig


@dataclass
class Settings:
    """A whole run. `python train.py --cfg job` prints it."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: str = "bytes"  # bytes | characters (of the training split) | gpt2 (downloaded) | a folder or OWNER/NAME
    optim: OptimConfig = field(default_factory=OptimConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    profile: bool = False  # record a few steps: a trace and where the time went, in the run's folder
    name: str | None = None  # the run's folder is runs/<name>/<time>; null: the experiment's name
    resume: str | None = None  # continue a run: its folder, a checkpoint of it, or auto, the newest run of that name
    init_from: str | None = None  # start a new run with a checkpoint's weights; optimizer, schedule and steps are new

    def __post_init__(self) -> None:
        """Rules that cross groups."""
        if self.name is not None and not is_folder_name(self.name):
            raise ValueError(f"name={self.name} is no name for a folder; use letters, digits, - and _")
        for key in ("resume", "init_from"):
            if getattr(self, key) == "":
                raise ValueError(f"{key} is empty; give a checkpoint or a run's folder, or leave it out")
        for key, value in flat(asdict(self)).items():
            try:
                (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
            except UnicodeEncodeError as error:  # checkpoints with such a name would be taken for damaged ones
                found = error.object[max(0, error.start - 30) : error.end]
                remedy = "give the file or folder another name, or type words as UTF-8"
                raise ValueError(f"{key}: {found!a} is not UTF-8; {remedy}") from error
        if self.tokenizer != self.model.name:  # else what is wrong is the model's name
            check_tokenizer(self.tokenizer)
        if self.model.name is not None:
            for key, value in (("optim", self.optim.name), ("train.micro_batch", self.train.micro_batch)):
                if value in ("muon", "auto"):
                    remedy = "optim=adamw" if value == "muon" else "a number"
                    raise ValueError(f"{key}={value} is for a GPT of ours; with model.name use {remedy}")
        tokens, seq_len = self.train.batch_tokens, self.data.seq_len
        if tokens % seq_len:
            nearest = max(seq_len, round(tokens / seq_len) * seq_len)
            if self.resume:  # a resumed run keeps its batch_tokens
                by_distance = chain.from_iterable((seq_len - gap, seq_len + gap) for gap in range(seq_len))
                nearest = f"data.seq_len={next(length for length in by_distance if tokens % length == 0)}"
            raise ValueError(f"train.batch_tokens={tokens} is not a multiple of data.seq_len={seq_len}; use {nearest}")
        ALONE.local_sequences(tokens // seq_len, self.train.micro_batch, seq_len)  # before anything else is done

    @property
    def sequences_per_step(self) -> int:
        return self.train.batch_tokens // self.data.seq_len
