"""The network, top to bottom: attention, MLP, block, GPT.

Letters in the shapes: B sequences, N tokens in each, C = n_embd, Hq query heads, Hkv key/value heads,
D = head_dim, V = vocab_size.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import cross_entropy, linear_cross_entropy, rms_norm, rotate_and_split, skinny_linear
from kernels.call import autocast_dtype
from model.attention import ATTENTION, AttentionFunction, Documents, Part
from model.cache import Cache, KVCache, PagedKVCache
from model.config import NORM_EPS, GPTConfig, round_up
from model.embedding import embed
from model.fp8 import use_fp8
from model.inference import decode, fused_block
from model.masks import Pattern, prefix_of
from model.positions import check_input, positions_in, rope_tables
from model.recompute import recompute
from model.sampling import whole

INIT_STD = 0.02  # GPT-2's
VOCAB_MULTIPLE = 64  # the head's matmul runs at full speed on sizes that are a multiple of 64


def norm(x: Tensor) -> Tensor:
    """RMS norm without a gain, in the dtype of products.

    The matrix that follows can absorb a gain; its gradient would cost one more pass over all tokens.
    """
    return rms_norm(x, NORM_EPS)


class CausalSelfAttention(nn.Module):
    """Attention of grouped query heads with rotary positions, between two products: (B, N, C) -> (B, N, C)."""

    def __init__(self, config: GPTConfig, layer: int, attend: AttentionFunction):
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_dim
        self.norm_eps = NORM_EPS if config.qk_norm else None
        self.scale = None if config.qk_gain == 1 else config.qk_gain * self.head_dim**-0.5  # None: attention's own
        self.layer = layer  # index in the KV cache
        self.window = (-1 if config.window is None else config.window - 1, -1)  # the causal mask bounds the right
        self.dropout_p = config.attention_dropout
        self.pattern: Pattern | None = None  # of model.mask, in place of causal and window
        self.attend = attend
        self.qkv = nn.Linear(config.n_embd, (self.num_heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        return self.out(self.heads(self.qkv(x), cos, sin, kv_cache, documents))  # (B, N, C)

    def heads(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        kv_cache: Cache | None = None,
        documents: Documents | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """Attention between its two projections: (B, N, (Hq + 2 Hkv) D) -> (B, N, C); cos is None after RoPE.

        overwrite: qkv may be overwritten, as nothing else reads it.
        """
        B, N, _ = qkv.shape
        qkv = qkv.view(B, N, -1, self.head_dim)  # (B, N, Hq + 2 Hkv, D)
        if cos is None:
            q, k, v = qkv.transpose(1, 2).split([self.num_heads, self.kv_heads, self.kv_heads], 1)
        else:
            # (B, H, N, D) each
            q, k, v = rotate_and_split(qkv, cos, sin, self.num_heads, self.norm_eps, overwrite=overwrite)
        if kv_cache is not None:
            o = kv_cache.attend(self.layer, q, k, v, self.attend, window=self.window, scale=self.scale)  # (B, Hq, N, D)
        else:
            dropout_p = self.dropout_p if self.training else 0.0
            seen = {"causal": True, "window": self.window}
            if self.pattern is not None:
                seen = {"block_mask": self.pattern(N)}
            o = self.attend(q, k, v, **seen, scale=self.scale, dropout_p=dropout_p, documents=documents)
        return o.transpose(1, 2).reshape(B, N, -1)  # (B, N, C)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU by tanh. A compiler's tanh takes longer than moving x; (1 + tanh(y)) / 2 is the sigmoid of 2 y."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    y = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(2 * y)).to(x.dtype)


class MLP(nn.Module):
    """Two products with a non-linearity between them: (B, N, C) -> (B, N, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind = config.mlp
        self.recompute_pointwise = config.activation_checkpointing == "pointwise"
        ways = 2 if self.kind == "swiglu" else 1  # SwiGLU's gate and value in one matmul
        self.up = nn.Linear(config.n_embd, ways * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, N, mlp_width), twice as wide with swiglu
        return recompute(self.finish, h) if self.recompute_pointwise else self.finish(h)

    def finish(self, h: Tensor) -> Tensor:
        return self.down(self.activate(h))  # (B, N, C)

    def activate(self, h: Tensor) -> Tensor:
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            return F.silu(gate) * value  # arXiv:2002.05202
        if self.kind == "relu2":
            return F.relu(h).square()  # arXiv:2109.08668
        return gelu(h)


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream: (B, N, C) -> (B, N, C)."""

    def __init__(self, config: GPTConfig, layer: int, attend: AttentionFunction):
        super().__init__()
        self.attention = CausalSelfAttention(config, layer, attend)
        self.mlp = MLP(config)
        self.dropout, self.recompute = config.dropout, config.activation_checkpointing

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Cache | None = None, documents: Documents | None = None
    ) -> Tensor:
        if kv_cache is None and self.recompute in ("full", "selective"):  # pointwise: only a part of the MLP
            keep = self.costly_products() if self.recompute == "selective" else None
            return recompute(self.compute, x, cos, sin, None, documents, keep=keep)
        return self.compute(x, cos, sin, kv_cache, documents)

    def compute(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Cache | None, documents: Documents | None
    ) -> Tensor:
        x = x + F.dropout(self.attention(norm(x), cos, sin, kv_cache, documents), self.dropout, self.training)
        x = x + F.dropout(self.mlp(norm(x)), self.dropout, self.training)
        return x  # (B, N, C)

    def costly_products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the products whose results activation_checkpointing=selective keeps besides attention's.

        Keeping a tensor costs bytes and saves the FLOPs of computing it again. For a token and layer in 16 bit:

            kept           FLOPs saved   bytes   FLOPs a byte
            attention's O  2NC           2C      N
            qkv            6C^2          6C      C
            out            2C^2          2C      C
            up             8C^2          8C      C
            down           0             2C      0      no block's backward reads it

        Of equals the narrow products are kept: they are memory-bound sooner, so they take longer per FLOP. With
        attention's O, qkv and out, a token and layer keeps 14C bytes, including its input x, and recomputes 8C^2 FLOPs.
        With up it would keep 22C and recompute none; `full` keeps 4C and recomputes all 16C^2 and attention.
        """
        attention = self.attention
        width, kv_width = attention.num_heads * attention.head_dim, attention.kv_heads * attention.head_dim
        return (width, width + 2 * kv_width), (width, width)


class GPT(nn.Module):
    """A decoder-only transformer: embedding, blocks, norm, head.

    Weights are drawn on the CPU in fp32 and then moved, so one seed gives the same network on every device
    and with every attention backend.

    Args:
        config: what the network is; its attention and loss are resolved names (`resolve_model`), never auto.
        vocab_size: number of token ids; tables are padded to a multiple of 64, outputs never are.
        seq_len: the longest context, in tokens.
        device: where the model will run; "meta" gives its shapes without memory or numbers.
        generator: a CPU generator for the weights; None draws from the global one.

    Raises:
        ValueError: an impossible size, or a name that is not resolved.
    """

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        seq_len: int,
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        config.validate()
        vocab_size, seq_len = whole("vocab_size", vocab_size, 1), whole("seq_len", seq_len, 1)
        for key in ("attention", "loss"):
            if getattr(config, key) == "auto":
                raise ValueError(f"model.{key}=auto must be resolved before GPT; give it the config of resolve_model")
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)
        padded_vocab = round_up(vocab_size, VOCAB_MULTIPLE)
        with torch.device("meta"):  # shapes only: init_weights draws each number once
            self.embedding = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(
                Block(config, layer, ATTENTION[config.attention]) for layer in range(config.num_layers)
            )
            self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, padded_vocab, bias=False)
        if config.fp8 != "none":
            use_fp8(self, config.fp8)
        if torch.device(device).type != "meta":
            self.to_empty(device="cpu")
            self.init_weights(generator)
        self.prefix = 0  # tokens that see each other both ways
        if config.mask is not None:
            self.prefix = prefix_of(config.mask, seq_len)
            pattern = Pattern(config.mask, config.window, seq_len, device)
            for block in self.blocks:
                block.attention.pattern = pattern
        self.to(device)
        self.register_load_state_dict_post_hook(GPT.make_tables)  # for weights that replaced those on meta

    def _apply(self, *arguments, **options) -> "GPT":
        """What `to`, `half`, `to_empty` and the like do to each tensor."""
        tables, self.cos, self.sin = (self.cos, self.sin), None, None
        try:
            super()._apply(*arguments, **options)
        finally:  # out of memory, say
            self.cos, self.sin = tables
        self.make_tables()
        return self

    def make_tables(self, *_) -> None:
        """Make what is no part of a checkpoint: tables of rotary positions, fp32 whatever the weights, and the mask."""
        if self.cos is None or self.cos.is_meta:
            self.cos, self.sin = rope_tables(self.seq_len, self.config.head_dim, self.config.rope_base)
        device = self.embedding.weight.device  # tables already there stay: a captured graph may read them
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        for module in self.modules():
            if isinstance(module, Pattern):
                module.make(device)  # on meta there was none

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of std 0.02; those that write to the residual stream divided by sqrt(2 layers).

        There are 2 x num_layers such writes, so their sum starts at the scale of one (GPT-2, section 2.3).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_parameters():
            writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(weight, std=residual_std if writes_residual else INIT_STD, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        kv_cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: (B, N), int64 or int32, below vocab_size; PyTorch finds those from the padded size on.
            targets: (B, N) int64, the id that follows each token; a negative one does not count.
            kv_cache: earlier tokens of B rows, to which these are appended (without targets); or `Prompts` with these
                tokens (1, N), and then only the last token of each prompt gives logits.
            cu_seqlens: (documents + 1,) int32: where documents begin among the B * N tokens, and B * N. Every row
                begins a document. Tokens then see only their own document, and positions start at 0 in each.
            part: the tokens' positions and documents, in place of cu_seqlens, where tokens are a part of longer rows.

        Returns:
            Without targets the logits (B, N, vocab_size), or (1, rows, vocab_size) for `Prompts`. With targets the
            cross-entropy in nats, an fp32 scalar summed over the tokens that count: the caller divides by the tokens
            of its whole step. A prefix (model.mask) is not predicted: its tokens count as the mean of the others.

        Raises:
            ValueError: the context would be longer than seq_len; tokens, targets or a cache of another shape; a cache
                with targets or cu_seqlens.
        """
        check_input(tokens, targets, cu_seqlens, kv_cache, self.config, self.seq_len)
        shape, documents, positions = tokens.shape, None, None
        share = 1.0  # fraction of the tokens that is predicted
        if targets is not None and self.prefix > 1:
            targets, share = self.past_prefix(targets)
        if part is not None:
            documents, cos, sin = part.documents, self.cos[part.positions], self.sin[part.positions]
        elif kv_cache is None and cu_seqlens is None:
            cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]  # (N, 1, D)
        else:
            tokens = tokens.reshape(1, -1)  # one row: from here on B is 1 and N all tokens
            if kv_cache is not None:
                positions = kv_cache.positions(*shape)
            else:
                documents = Documents(cu_seqlens, max_seqlen=shape[1])
                positions = positions_in(cu_seqlens, tokens.size(1))
        x = F.dropout(embed(tokens, self.embedding.weight), self.config.dropout, self.training)  # (B, N, C)
        fused = None if kv_cache is None else fused_block(x, self.blocks)
        if fused is decode and not self.config.qk_norm:  # its RoPE is part of a product; a norm would come between
            cos, sin = self.cos, self.sin
        elif positions is not None:
            cos, sin, positions = self.cos[positions], self.sin[positions], None
        for block in self.blocks:
            if fused:
                x = fused(block, x, cos, sin, positions, kv_cache)
            else:
                x = block(x, cos, sin, kv_cache, documents)
        if kv_cache is not None:
            kv_cache.advance(shape[1])
            if kv_cache.last is not None:
                x, shape = x[:, kv_cache.last], (1, len(kv_cache.last))
        table = self.embedding.weight if self.head is None else self.head.weight  # (padded V, C)
        if fused is decode:
            logits = skinny_linear(x, table, norm_eps=NORM_EPS)
            return logits[..., : self.vocab_size].view(*shape, -1)
        x = norm(x)
        if targets is not None and self.config.loss == "chunked":
            return linear_cross_entropy(x.flatten(0, 1), table, targets.flatten(), self.vocab_size) / share
        logits = F.linear(x, table)  # (B, N, padded V)
        if targets is None:
            return logits[..., : self.vocab_size].view(*shape, -1)  # the padding is cut off
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), self.vocab_size) / share

    def past_prefix(self, targets: Tensor) -> tuple[Tensor, float]:
        """Targets (B, N) without those inside the prefix (-1), and the fraction that is left. ValueError if none is."""
        num_tokens, unpredicted = targets.size(1), self.prefix - 1
        if num_tokens <= unpredicted:
            raise ValueError(f"model.mask={self.config.mask} predicts nothing of {num_tokens} tokens; give more")
        targets = targets.index_fill(1, torch.arange(unpredicted, device=targets.device), -1)
        return targets, (num_tokens - unpredicted) / num_tokens

    def make_cache(
        self, num_rows: int, max_tokens: int | None = None, page: int | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        """A cache for rows of up to `max_tokens` tokens (None: seq_len), none of them in use, on the model's device.

        With `page` it has pages of that many tokens, enough for all rows; `dtype` None is what attention runs in now.
        """
        if self.config.mask is not None:
            raise ValueError(
                f"model.mask={self.config.mask} has no KV cache: it cannot generate text; train with model.mask=null"
            )
        max_tokens = self.seq_len if max_tokens is None else max_tokens
        if not 1 <= max_tokens <= self.seq_len:
            raise ValueError(f"max_tokens={max_tokens} must be from 1 to the model's seq_len={self.seq_len}")
        device, dtype = self.embedding.weight.device, dtype or self.compute_dtype
        if page is None:
            return KVCache(self.config, num_rows, max_tokens, device, dtype)
        return PagedKVCache(self.config, num_rows, max_tokens, None, page, device, dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that products and attention run in now: autocast's where it is on, else the weights'."""
        return autocast_dtype(self.embedding.weight)

    def for_inference(self, dtype: torch.dtype) -> "GPT":
        """A copy in eval mode with its weights cast to `dtype`; weights that already have it are shared.

        A model that is such a copy returns itself, as copying the modules takes longer than a short prompt.
        """
        modules = list(self.modules())
        weights = [w for m in modules for w in m._parameters.values() if w is not None]  # `parameters` takes longer
        if not any(m.training for m in modules) and all(w.dtype == dtype and not w.requires_grad for w in weights):
            return self
        memo = {
            id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False) for weight in self.parameters()
        }
        kept = [value for m in modules for name, value in vars(m).items() if name.endswith("_hooks")]
        hooks = [hook for of_one_kind in kept for hook in of_one_kind.values()]
        attends = [block.attention.attend for block in self.blocks if hasattr(block.attention, "attend")]
        memo |= {id(x): x for x in (self.cos, self.sin, *hooks, *attends)}  # are shared
        return copy.deepcopy(self, memo).eval()

    def num_parameters(self) -> int:
        """Number of weights, padded rows included."""
        return sum(weight.numel() for weight in self.parameters())

    def num_matmul_parameters(self) -> int:
        """Entries of the weights that multiply activations: all but a table that serves look-ups only."""
        looked_up_only = 0 if self.head is None else self.embedding.weight.numel()
        return self.num_parameters() - looked_up_only
