"""How much device memory a training step takes, from its configuration alone: what a run prints before it allocates.

A step passes moments that could be its fullest; each is a sum of terms, and the forecast is the largest. The terms
count what autograd keeps of each layer of model/gpt.py on CUDA in eager mode. Assumed: torch.compile keeps the same in
16 bit but for SwiGLU's first factor (on an H200 the 124M model's peaks differ by 0.3 %), and in float32, where it
recomputes norms, no more; it recomputes a block piece by piece where `selective` has cut it in two; `sdpa` and `tiled`
keep what flash keeps, an output and a log-sum-exp; packed documents are as long as their row. Not counted: the CUDA
context and the allocator's fragments.
"""

from dataclasses import dataclass

import torch

from kernels.fused.linear_cross_entropy import CHUNK_TOKENS
from model import GPTConfig
from model.config import round_up
from model.gpt import VOCAB_MULTIPLE
from model.recompute import recomputes_blocks

STREAM = 4  # bytes of a number of weights, gradients, statistics and the residual stream: float32
TOKEN_ID = 8  # int64
CUBLAS_BYTES = 2 * 32 * 2**20  # workspaces of the forward's and of the backward's thread on Hopper; less elsewhere
# Bytes a pair (query, key, head) that naive attention holds beyond what it keeps: scores and the temporary of their
# log-sum-exp. In 16 bit and recomputed, its backward is fuller: on an H200 16 bytes a pair in all, 6 of them kept
# (52.44 GiB for the 124M model at 4,096 tokens, 16.43 at 1,024); on a CPU 12.
NAIVE_WORK, NAIVE_WORK_RECOMPUTED = 8, {"cuda": 10, "cpu": 6}
GIB = 2**30

Terms = dict[str, int]  # name -> bytes


@dataclass(frozen=True)
class Work:
    """One training step. `model.attention` and `model.loss` are resolved names; `dtype` is that of the products."""

    model: GPTConfig
    vocab_size: int
    seq_len: int
    micro_batch: int  # sequences of one forward and backward
    micro_batches: int = 1  # of a step
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"  # cuda | cpu: the plain loss differs
    compiled: bool = False

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def columns(self) -> int:
        """Rows of a vocabulary table, columns of the logits: padding included."""
        return round_up(self.vocab_size, VOCAB_MULTIPLE)

    @property
    def table(self) -> int:
        """Numbers of one vocabulary table."""
        return self.columns * self.model.n_embd

    @property
    def up(self) -> int:
        """Columns that the MLP's first product has."""
        return (2 if self.model.mlp == "swiglu" else 1) * self.model.mlp_width

    @property
    def packed(self) -> int:
        """Columns of q, k and v together."""
        return (self.model.num_heads + 2 * self.model.kv_heads) * self.model.head_dim

    @property
    def matrices(self) -> Terms:
        """Numbers of one block's weights."""
        width, hidden = self.model.n_embd, self.model.mlp_width
        return {"qkv": width * self.packed, "out": width**2, "up": width * self.up, "down": hidden * width}

    @property
    def weights(self) -> int:
        """Numbers of all weights: GPT.num_parameters()."""
        tables = 1 if self.model.tie_embeddings else 2
        return tables * self.table + self.model.num_layers * sum(self.matrices.values())

    @property
    def pairs(self) -> int:
        """(query, key, head) of one layer and micro-batch: naive attention stores masked ones too."""
        return self.tokens * self.seq_len * self.model.num_heads


@dataclass(frozen=True)
class Forecast:
    """Terms of each moment that could be the fullest, and what each layer keeps for its backward, by kind."""

    moments: dict[str, Terms]
    layers: list[Terms]

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def terms(self) -> Terms:
        return self.moments[self.fullest]

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.terms.values())

    def __str__(self) -> str:
        """One line; terms below 10 MiB are left out."""
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.terms.items() if size >= 10 * 2**20)
        return f"{self.peak / GIB:.2f} GiB, fullest at {self.fullest}" + (f": {terms}" if terms else "")


def block_activations(work: Work) -> Terms:
    """Bytes that one block keeps for its backward when nothing is recomputed, by kind."""
    model, size = work.model, work.dtype.itemsize
    width, hidden, naive = model.n_embd, model.mlp_width, model.attention == "naive"
    per_token = {
        "residual stream": 2 * (STREAM * width + STREAM),  # what each norm reads, and its 1 / RMS
        "norms' outputs": 2 * size * width,
        # naive attention repeats the heads of k and v that are shared
        "q, k, v": size * (3 * width if naive else work.packed),
        "attention": size * width + (0 if naive else STREAM * model.num_heads),  # O, log-sum-exp
        "MLP": size * hidden * {"gelu": 2, "swiglu": 3 if work.compiled else 4, "relu2": 2}[model.mlp],
    }
    if model.mlp == "relu2" and size < STREAM:
        per_token["MLP"] += STREAM * hidden  # autocast squares in float32
    if model.qk_norm:
        per_token["q, k, v"] += size * work.packed + STREAM * (model.num_heads + model.kv_heads)
    if model.dropout:
        per_token["dropout masks"] = 2 * width
    terms = {kind: work.tokens * bytes_ for kind, bytes_ in per_token.items()}
    if naive:
        # probabilities in float32 and, where that is another format, in the products'; the mask, and dropout's
        a_pair = STREAM + (size if size < STREAM or model.attention_dropout else 0) + (model.attention_dropout > 0)
        terms["scores"] = work.pairs * a_pair + work.seq_len**2
    return terms


def kept_activations(work: Work, layer: int) -> Terms:
    """Bytes that block `layer` keeps between forward and backward under the configured checkpointing, by kind."""
    model, terms = work.model, block_activations(work)
    mode = model.activation_checkpointing
    if mode == "pointwise":
        terms["MLP"] = work.tokens * work.dtype.itemsize * work.up
    if not recomputes_blocks(mode):
        return terms
    kept = {"residual stream": work.tokens * STREAM * model.n_embd}
    if mode == "selective":
        kept["products"] = work.tokens * work.dtype.itemsize * (work.packed + model.n_embd)
        if model.attention in ("flash", "sdpa"):  # whose operators the policy names
            kept["attention"] = terms["attention"]
    return kept


def forecast(work: Work) -> Forecast:
    """The terms of every moment of a step, from the second step on, when the optimizer's state is there."""
    model, size, tokens, width = work.model, work.dtype.itemsize, work.tokens, work.model.n_embd
    layers = [kept_activations(work, layer) for layer in range(model.num_layers)]
    block, last = block_activations(work), layers[-1]
    kept = sum(sum(terms.values()) for terms in layers) + (tokens * width if model.dropout else 0)  # the embedding's
    with_last = at_mlp = kept + max(0, sum(block.values()) - sum(last.values()))  # backward brings back what it dropped
    is_whole = not recomputes_blocks(model.activation_checkpointing)

    gradients = STREAM * work.weights
    accumulated = gradients if work.micro_batches > 1 else 0
    new = STREAM * work.table  # the head's is the first
    mlp_gradients = STREAM * (work.matrices["up"] + work.matrices["down"])
    copies = weight_copies(work)
    dx = tokens * STREAM * width
    mlp_work = tokens * size * work.up + dx + (tokens * size * width if size < STREAM else 0)
    if model.mlp == "relu2" and size < STREAM:
        mlp_work += 2 * tokens * STREAM * model.mlp_width
    if work.compiled and model.activation_checkpointing == "selective":
        # a block comes back in pieces: its MLP needs x and what `out` returned, so q, k and v follow after it, and no
        # sum of the residual stream is stored. A gradient takes the memory of what it belongs to. Fullest is the last
        # norm's backward, with what `down` returned and its own gradient; SwiGLU, where one gradient becomes two
        at_mlp = kept + block["norms' outputs"] // 2 + tokens * size * (work.up + model.mlp_width)
        mlp_work = dx + tokens * size * (width + max(2 * width, work.up if model.mlp == "swiglu" else 0))
    attention_work = dx + tokens * size * (width + 2 * work.packed)  # dO; dq, dk, dv apart and together
    if model.attention == "naive":
        a_pair = NAIVE_WORK if is_whole or size == STREAM else NAIVE_WORK_RECOMPUTED[work.device]
        attention_work = dx + work.pairs * a_pair
    held = {
        "parameters": STREAM * work.weights,
        "optimizer state": optimizer_bytes(work),
        # cosine and sine; inputs and targets of this step and of the next
        "batch and tables": 2 * work.seq_len * model.head_dim * STREAM + 4 * tokens * work.micro_batches * TOKEN_ID,
        "cuBLAS": CUBLAS_BYTES if work.device == "cuda" else 0,
    }
    moments = {
        "the loss": {
            "gradients": accumulated,
            "activations": kept + tokens * (STREAM * width + STREAM),  # and what the last norm reads
            "16-bit weights": weight_copies(work, in_forward=model.loss == "chunked"),
            "logits and loss": loss_bytes(work),
        },
        "the last MLP's backward": {
            "gradients": accumulated + new,
            "activations": at_mlp,
            "16-bit weights": copies,
            "workspace": mlp_work,
        },
        "the last attention": {
            "gradients": accumulated + new + mlp_gradients,
            # without the MLP and the norm before it
            "activations": with_last - block["MLP"] - (block["residual stream"] + block["norms' outputs"]) // 2,
            "16-bit weights": copies,
            "workspace": attention_work,
        },
        "the optimizer's step": {"gradients": gradients, "workspace": optimizer_workspace(work)},
    }
    return Forecast({name: held | terms for name, terms in moments.items()}, layers)


def weight_copies(work: Work, *, in_forward: bool = False) -> int:
    """Bytes of the blocks' weights in the products' format: autocast has all until the forward ends, and backward
    those of the blocks that are not recomputed."""
    model, size = work.model, work.dtype.itemsize
    if size == STREAM:
        return 0
    layers = range(model.num_layers)
    mode = model.activation_checkpointing
    kept = [layer for layer in layers if in_forward or not recomputes_blocks(mode)]
    recast = work.matrices["down"] if mode == "pointwise" and not in_forward else 0
    return size * len(kept) * (sum(work.matrices.values()) - recast)


def loss_bytes(work: Work) -> int:
    """Bytes of the head and its loss where they hold most."""
    size, tokens, width = work.dtype.itemsize, work.tokens, work.model.n_embd
    h = tokens * size * width
    table = size * work.table if size < STREAM else 0  # its copy
    if work.model.loss == "plain":
        if work.device == "cpu":  # float32 copy, log-probabilities and their gradient
            return h + table + tokens * (3 * STREAM * work.vocab_size)
        return h + table + tokens * (2 * size * work.columns + 2 * STREAM)  # logits, their gradient, statistics
    chunk = min(CHUNK_TOKENS, tokens)
    a_logit = size + (3 * STREAM if work.device == "cpu" else 0)
    whole_h = tokens * STREAM * width if size < STREAM and not work.compiled else 0  # as the norm returns it
    return 2 * h + whole_h + table + STREAM * work.table + chunk * a_logit * work.columns


def optimizer_bytes(work: Work) -> int:
    """AdamW: two moments of every weight. Muon: one of the blocks' matrices, AdamW's of the tables."""
    hidden = work.model.num_layers * sum(work.matrices.values())
    return STREAM * (2 * work.weights - (hidden if work.optimizer == "muon" else 0))


def optimizer_workspace(work: Work) -> int:
    """Fused AdamW needs none on CUDA; a loop over tensors two of the largest. Muon: an update in float32, and
    Newton-Schulz's four 16-bit copies, of the largest matrix."""
    loop = 2 * STREAM * max(work.table, *work.matrices.values()) if work.device == "cpu" else 0
    muon = (STREAM + 4 * 2) * max(work.matrices.values()) if work.optimizer == "muon" else 0
    return max(loop, muon)
