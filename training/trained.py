"""The trained network and the tokenizer of a checkpoint, for programs that use them."""

from pathlib import Path
from typing import get_type_hints

import tiktoken
import torch

from data import tokenizer_from_state
from model import GPT, GPTConfig, build_model, resolve_model
from model.config import as_described
from training.checkpoint import META, Checkpoint
from training.checkpoint_files import use_its_commit

# keys of a checkpoint's description
NEEDED = {
    "settings": {"model": {}, "data": {"seq_len": int}},
    "tokenizer": {"name": str, "alphabet": str},
    "vocab_size": int,
}


def given_or_newest(checkpoint: str | None) -> str | Path:
    """`checkpoint` as typed; for None, the most recently written `last` under runs/."""
    if checkpoint == "":  # an unset variable, say: not a choice
        raise ValueError("checkpoint is empty; give a checkpoint or a run's folder, or leave it out for the newest")
    if checkpoint is not None:
        return checkpoint
    found = sorted(Path("runs").glob("**/checkpoints/last/" + META), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError("no checkpoint under runs/; train first (python train.py) or give checkpoint=PATH")
    return found[-1].parent


def load_trained(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype, *, attention: str
) -> tuple[GPT, tiktoken.Encoding]:
    """The GPT of `checkpoint` with its weights on `device`, and its tokenizer.

    Args:
        dtype: what attention will run in.
        attention: in place of the run's own; everything else but fp8, which is off, is as it was trained.

    Raises:
        ValueError: the description is damaged or of another version, or that attention cannot run here.
    """
    checkpoint.require(NEEDED, checkpoint.meta, META)
    tokenizer = tokenizer_from_state(checkpoint.meta["tokenizer"])
    settings = checkpoint.meta["settings"]
    refuse_other_keys(checkpoint, "model", GPTConfig)
    if tokenizer.n_vocab != checkpoint.meta["vocab_size"]:
        raise ValueError(
            f"checkpoint {checkpoint.path} has vocab_size={checkpoint.meta['vocab_size']}, its tokenizer "
            f"{tokenizer.n_vocab}; use another checkpoint"
        )
    its_own = settings["model"] | {"attention": attention, "fp8": "none"}  # products in 8 bits are for training alone
    asked, model = GPTConfig(**its_own), None
    theirs = None if asked.name is None else checkpoint.theirs

    def built() -> GPT:
        config, *_ = resolve_model(asked, device, dtype)
        return build_model(config, checkpoint.meta["vocab_size"], settings["data"]["seq_len"], device=device)

    try:
        if theirs is None or asked.theirs == theirs:
            model = built()
    except ValueError:  # its folder was moved, say
        if theirs is None:
            raise
    if model is None:
        with as_described(asked.name, theirs):
            model = built()
    checkpoint.load_weights(model)
    return model, tokenizer


def refuse_other_keys(checkpoint: Checkpoint, group: str, config: type) -> None:
    """Raise ValueError if the run's settings of a group are not those of a `config` of this version."""
    found, kinds = checkpoint.meta["settings"][group], get_type_hints(config)
    if unknown := found.keys() - kinds.keys():
        raise ValueError(
            f"checkpoint {checkpoint.path} has {group}.{min(unknown)}, which this version does not know; "
            + use_its_commit(checkpoint.meta)
        )
    checkpoint.require({"settings": {group: {key: kinds[key] for key in found}}}, checkpoint.meta, META)
