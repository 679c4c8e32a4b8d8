"""The settings of a run with `resume` or `init_from`: the earlier run's, and the command line's on top."""

from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from conf.arguments import literal
from conf.keys import files_of, package_of
from training.checkpoint import META, open_checkpoint
from training.comparison import flat, forked_from
from training.resume import MAY_CHANGE, earlier_settings, settings_as_asked


def with_earlier_settings(cfg: DictConfig, typed: list[str], run_dir: Path, known: set[str]) -> DictConfig:
    """`cfg` with the settings of the run that `resume` or `init_from` names.

    A resumed run keeps its settings, except the keys in `typed` and all keys of a typed group whose choice differs:
    these are `cfg`'s. With `init_from` model and tokenizer are the checkpoint's, unless `typed` chooses an experiment;
    a model of transformers then gets AdamW, unless `typed` chooses an optimizer.

    cfg: the composed configuration.
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
            earlier |= {"resume": str(resume), "profile": False}  # a profile must be requested each time
            cfg, composed = OmegaConf.create({}), cfg
            _apply_values(cfg, earlier, known)
            _apply_overrides(cfg, composed, overrides)
            # killed before it saved: it goes on from its origin again, as it will if it is killed again
            if resume == "auto" and (origin := forked_from(run_dir)):
                OmegaConf.update(cfg, "resume", origin)
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
        if first.get("model.name") and not chosen & {"optim", "optim.name"}:  # Muon is for a GPT of ours
            theirs = OmegaConf.load(Path(__file__).parent / "optim" / "adamw.yaml")
            first |= {f"optim.{key}": value for key, value in theirs.items()}
        _apply_values(cfg, first, known)
        _apply_overrides(cfg, composed, overrides)
    return cfg


def _apply_values(cfg: DictConfig, values: dict[str, Any], known: set[str]) -> None:
    for key, value in values.items():
        if key in known:
            OmegaConf.update(cfg, key, literal(value), force_add=True)


def _is_chosen(cfg: DictConfig, group: str, choice: object) -> bool:
    """Whether `cfg` already has that choice of a group: its file's source, name and config, else all of it, and any
    value for a ???."""
    if "." in group or not (files := files_of(group, choice)):
        return False
    values, package = OmegaConf.to_container(OmegaConf.load(files[0])), package_of(files[0], group)
    values = flat(values, f"{package}." if package else "")
    asked = [key for key, value in values.items() if value == "???"]
    chosen = {key: value for key, value in values.items() if key not in asked and "$" not in str(value)}
    names = {key: chosen[key] for key in (f"{group}.{name}" for name in ("source", "name", "config")) if key in chosen}
    same = all(OmegaConf.select(cfg, key) == value for key, value in (names or chosen).items())
    return bool(values) and same and all(OmegaConf.select(cfg, key) is not None for key in asked)


def _apply_overrides(cfg: DictConfig, composed: DictConfig, overrides: list[Override]) -> None:
    """Set in `cfg` what each override composed to; for a group, all of its keys."""
    for override in overrides:
        key = override.key_or_group
        if key == "experiment" or _is_chosen(cfg, key, override.value()):
            continue
        group, _, name = key.rpartition(".")
        if override.is_delete():
            (OmegaConf.select(cfg, group) if group else cfg).pop(name, None)
        else:
            OmegaConf.update(cfg, key, OmegaConf.select(composed, key), merge=False, force_add=True)
