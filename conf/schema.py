"""What a run is made of: one dataclass a group, each owned by the module that reads it, composed here.

YAML keys, dataclass fields and the README use the same words. Nothing below `train.py` sees OmegaConf.
"""

from dataclasses import dataclass, field

from data import DataConfig, TokenizerConfig
from model import GPTConfig
from training.hardware import HardwareConfig
from training.nonfinite import POLICIES
from training.optimizer import OptimConfig
from training.runlog import LoggerConfig


@dataclass
class TrainConfig:
    """What the loop itself reads."""

    steps: int = 300  # optimizer steps
    seed: int = 0  # of the initial weights, the order of the windows, dropout
    data_seed: int | None = None  # of the order of the windows alone; null: seed
    batch_tokens: int = 4096  # tokens of one optimizer step, over all micro-batches
    micro_batch: int | str | None = None  # sequences of one forward and backward; null: the whole step; auto: what fits
    log_every: int = 10  # steps between two lines of metrics
    eval_every: int = 100  # steps between two evaluations; 0: only at the end
    eval_windows: int = 64  # validation windows of seq_len tokens, always the same ones
    sample_every: int = 0  # steps between two printed samples; 0: only at the end
    sample_tokens: int = 200  # length of a printed sample; 0: none
    sample_prompt: str = ""  # what the samples continue; empty: the beginning of the validation text
    save_every: int = 0  # steps between two checkpoints; 0: only the best and the last
    keep_last: int = 3  # how many of the newest checkpoints are kept; the best is kept in any case
    keep_every: int = 0  # checkpoints of steps that are multiples of this are kept for good; 0: none
    on_nonfinite: str = "stop"  # stop | skip | rollback: what follows a step whose loss or gradient is not finite
    max_hours: float | None = None  # stop, save and leave after so long, start-up included; null: no limit

    def __post_init__(self) -> None:
        for key in ("steps", "batch_tokens", "log_every", "eval_windows", "keep_last"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key}={getattr(self, key)} must be at least 1")
        for key in ("eval_every", "sample_every", "sample_tokens", "save_every", "keep_every", "seed", "data_seed"):
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"train.{key}={getattr(self, key)} must be at least 0")
        for key in ("seed", "data_seed"):
            if (getattr(self, key) or 0) >= 1 << 64:
                raise ValueError(f"train.{key}={getattr(self, key)} must be below 2^64, as generators take no more")
        number = 1 if self.micro_batch in (None, "auto") else self.micro_batch
        if isinstance(number, bool | str) or number < 1:
            raise ValueError(f"train.micro_batch={self.micro_batch} must be at least 1 sequence, auto or null")
        if self.on_nonfinite not in POLICIES:
            raise ValueError(f"train.on_nonfinite={self.on_nonfinite} is not one of {', '.join(POLICIES)}")
        if self.on_nonfinite == "rollback" and not (self.save_every or self.eval_every):
            raise ValueError("train.on_nonfinite=rollback has nothing to go back to with train.save_every=0; raise it")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"train.max_hours={self.max_hours} must be more than 0, or null")


@dataclass
class Settings:
    """A whole run. `python train.py --cfg job` prints it."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: bool = False  # record a few steps: a trace and where the time went, in the run's folder
    resume: str | None = None  # a checkpoint or a run's folder, and the run goes on there; auto: its newest checkpoint

    def __post_init__(self) -> None:
        """Rules that cross groups."""
        tokens, seq_len = self.train.batch_tokens, self.data.seq_len
        if tokens % seq_len:
            nearest = max(seq_len, round(tokens / seq_len) * seq_len)
            raise ValueError(f"train.batch_tokens={tokens} is not a multiple of data.seq_len={seq_len}; use {nearest}")
        if isinstance(self.train.micro_batch, int) and (tokens // seq_len) % self.train.micro_batch:
            raise ValueError(
                f"train.micro_batch={self.train.micro_batch} does not divide the {tokens // seq_len} sequences "
                f"of a step (train.batch_tokens={tokens} / data.seq_len={seq_len}); use one that does"
            )
        if self.optim.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} must be less than train.steps={self.train.steps}"
            )

    @property
    def sequences_per_step(self) -> int:
        return self.train.batch_tokens // self.data.seq_len

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward pass."""
        if self.train.micro_batch == "auto":
            raise ValueError("train.micro_batch=auto is for train.py, which fills in what fits; name a number here")
        return self.train.micro_batch or self.sequences_per_step
