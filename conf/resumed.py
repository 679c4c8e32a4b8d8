"""What a run is that does not begin at nothing: settings of an earlier one, and on top what the command line names."""

import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from training.checkpoint import META, open_checkpoint
from training.resume import MAY_CHANGE, earlier_settings, settings_as_asked


def with_earlier_settings(cfg: DictConfig, typed: list[str], run_dir: Path, known: set[str]) -> DictConfig:
    """`cfg` as the run that `resume` or `init_from` names makes it.

    A resumed run is what it was; the keys and groups of `typed` are `cfg`'s. With `init_from` model and tokenizer are
    the checkpoint's, where `typed` chooses no experiment: those are then all of `cfg`'s.

    Args:
        cfg: what was composed.
        typed: the arguments of the command line.
        known: the schema's keys; others, of an earlier version, are left out.

    Raises:
        ValueError: no such checkpoint, or one that is damaged.
    """
    resume, init_from = (OmegaConf.select(cfg, key) for key in ("resume", "init_from"))
    overrides = OverridesParser.create().parse_overrides(typed)
    chosen = {override.key_or_group for override in overrides}
    earlier: dict[str, Any] = {}
    if resume and isinstance(resume, str | int | float):
        earlier = earlier_settings(str(resume), run_dir)
        if earlier:
            earlier |= {"resume": str(resume), "profile": False}  # a profile is asked for each time
            cfg, composed = OmegaConf.create({}), cfg
            _take(cfg, earlier, known)
            _type(cfg, composed, overrides)
            if "experiment" in chosen:
                print("settings   the run's own; experiment is not read again, other keys that were typed are")
    if init_from and isinstance(init_from, str) and not earlier and "experiment" not in chosen:
        checkpoint = open_checkpoint(init_from, verify=(META,))
        kept = {f"model.{key}" for key in MAY_CHANGE}
        first = {
            key: value
            for key, value in settings_as_asked(checkpoint).items()
            if key == "tokenizer" or (key.startswith("model.") and key not in kept)
        }
        composed = cfg.copy()
        OmegaConf.set_struct(cfg, False)
        _take(cfg, first, known)
        _type(cfg, composed, overrides)
    return cfg


def _take(cfg: DictConfig, values: dict[str, Any], known: set[str]) -> None:
    for key, value in values.items():
        if key in known:
            OmegaConf.update(cfg, key, _literal(value), force_add=True)


def _type(cfg: DictConfig, composed: DictConfig, overrides: list[Override]) -> None:
    """Give `cfg` what was composed of each override: of a group all of it."""
    for override in overrides:
        key = override.key_or_group
        if key == "experiment":
            continue
        group, _, name = key.rpartition(".")
        if override.is_delete():
            (OmegaConf.select(cfg, group) if group else cfg).pop(name, None)
        else:
            OmegaConf.update(cfg, key, OmegaConf.select(composed, key), merge=False, force_add=True)


def _literal(value: Any) -> Any:
    """A value that OmegaConf leaves as it is: what was resolved once refers to nothing."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
