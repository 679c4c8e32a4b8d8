"""A block's forward over a KV cache, without gradients and in fewer launches: each matrix product also does the work of
its neighbours.

For few tokens (a step of generation) each product is one kernel with everything around it (`skinny_linear`). For many
(prompts) the library's products add the residual stream and apply GELU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from kernels import rms_norm, skinny_linear, takes_skinny_linear
from model.cache import Cache
from model.config import NORM_EPS
from model.fp8 import Linear8

_OURS = f"{__package__}.gpt"
FusedBlock = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, Cache], Tensor]


def fused_block(x: Tensor, blocks: Iterable[nn.Module]) -> FusedBlock | None:
    """`decode` or `prefill`, whichever can replace a block's forward for x (B, N, C); None where neither can."""
    plain = x.is_cuda and not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
    if takes_skinny_linear(x):
        fused = decode
    elif plain and x.dtype.itemsize == 2:  # products of its own dtype, which may overwrite it
        fused = prefill
    else:
        return None
    return fused if all(map(can_fuse, blocks)) else None


def can_fuse(block: nn.Module) -> bool:
    """Whether all of the block is ours, its products have weights as we made them and no bias, and nothing is hooked.

    A GPU waits for this before a prompt: each name of a module is looked up once, as that takes half a microsecond.
    """
    if not is_ours(block):  # it may have other parts
        return False
    attention, mlp = block.attention, block.mlp
    if not (is_ours(attention) and is_ours(mlp)):
        return False
    products = products_of(block)
    return all(map(is_plain, products)) and not hooked(block, attention, mlp, *products)


def is_plain(product: nn.Module) -> bool:
    """Whether it is a linear layer without bias, whose weight is a plain, contiguous tensor."""
    if type(product) not in (nn.Linear, Linear8) or product.bias is not None:
        return False
    weight = product.weight
    return type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous()


def is_ours(module: nn.Module) -> bool:
    """Whether its forward is that of model/gpt.py: a subclass may have another."""
    return type(module).__module__ == _OURS


def hooked(*modules: nn.Module) -> bool:
    """Whether a hook watches one of the modules, or one has a forward in place of its class's."""
    watched = (m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
    return _has_any_global_hook() or any(watched)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, no module of the model is in training mode; on exit each returns to its previous mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def products_of(block: nn.Module) -> tuple[nn.Module, ...]:
    attention, mlp = block.attention, block.mlp
    return attention.qkv, attention.out, mlp.up, mlp.down


def decode(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, kv_cache: Cache) -> Tensor:
    """Few tokens: attention, and four products with the rest fused in.

    cos, sin: of all positions, where `positions` gives those of the tokens; or of the tokens, with `positions` None.
    """
    attention, mlp = block.attention, block.mlp
    rotary = None
    if positions is not None:
        rotary, cos, sin = (cos, sin, attention.num_heads + attention.kv_heads), None, None
    qkv = skinny_linear(x, attention.qkv.weight, norm_eps=NORM_EPS, rotary=rotary, positions=positions)
    o = attention.heads(qkv, cos, sin, kv_cache)
    x = skinny_linear(o, attention.out.weight, residual=x)
    h = skinny_linear(x, mlp.up.weight, norm_eps=NORM_EPS, activation=mlp.kind)
    return skinny_linear(h, mlp.down.weight, residual=x, workspace=kv_cache.products_workspace)  # (B, N, C)


def prefill(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, positions: None, kv_cache: Cache) -> Tensor:
    """Many tokens; cos and sin are those of the tokens, and x is overwritten."""
    attention, mlp, rows = block.attention, block.mlp, x.view(-1, x.size(-1))
    qkv = F.linear(rms_norm(x, NORM_EPS), attention.qkv.weight)
    o = attention.heads(qkv, cos, sin, kv_cache, overwrite=True)
    rows.addmm_(o.flatten(0, -2), attention.out.weight.T)
    if mlp.kind == "gelu" and x.is_cuda:  # elsewhere the GELU of PyTorch's product is a different one
        bias = rows.new_zeros(mlp.up.out_features)
        h = torch._addmm_activation(bias, rms_norm(rows, NORM_EPS), mlp.up.weight.T, use_gelu=True)
    else:
        h = mlp.activate(F.linear(rms_norm(rows, NORM_EPS), mlp.up.weight))
    rows.addmm_(h, mlp.down.weight.T)
    return x
