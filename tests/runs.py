"""Small runs for tests: settings composed as the command line composes them."""

from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from conf.program import register, settings_from
from conf.schema import Settings

CORPUS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n" * 60

# a GPT small enough that a step takes milliseconds
SMALL = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.n_embd=32",
    "model.attention=sdpa",
    "data.seq_len=32",
    "train.batch_tokens=256",
    "optim.warmup_steps=1",
    "train.eval_windows=4",
    "train.sample_tokens=0",
    "logger.wandb=disabled",
    "hardware=cpu",
)


def settings(*overrides: str, schema: type = Settings, config: str = "config"):
    """The settings that `python train.py <overrides>` would run."""
    register(schema)
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(config, overrides=list(overrides))
    OmegaConf.set_struct(cfg, False)
    return settings_from(cfg, schema)


def small_run(tmp_path: Path, *overrides: str) -> Settings:
    """A run on a corpus of a few kilobytes, with its cache under `tmp_path`."""
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(CORPUS)
    return settings("data=text", f"data.files={corpus}", f"data.cache_dir={tmp_path / 'cache'}", *SMALL, *overrides)
