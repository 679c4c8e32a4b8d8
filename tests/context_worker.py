"""What one of four processes does for tests/test_context.py: each case on a group of them, beside one process alone.

`heads`, `gather` and `ring` have the form that a judge outside calls: function(q, k, v, group=, causal=, window=,
scale=), the definition in float64 and our kernels in fewer bits.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kernels import place_documents
from model import ATTENTION, GPT, GPTConfig
from model.attention import Documents, flash, naive
from model.context import METHODS, documents_of_chunks, part_of
from model.recompute import recompute
from tests.runs import metrics, small_run
from train import train
from training import curves
from training.context import ContextParallel
from training.parallel import ALONE, World

PROCESSES = 4
STARTS = (0, 3, 4, 11, 12, 13, 19)  # of documents, in a row; some end within a chunk and some are one token


def _way(method: str, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return METHODS[method](naive if q.dtype == torch.float64 else flash, q, k, v, **options)


heads, gather, ring = (partial(_way, method) for method in ("heads", "gather", "ring"))


def attention_case(
    group: dist.ProcessGroup,
    method: str,
    attention: str = "naive",
    dtype: torch.dtype = torch.float64,
    *,
    rows: int = 1,
    chunk: int = 3,
    head_dim: int = 16,
    packed: bool = False,
    compiled: bool = False,
    recomputed: bool = False,
    **options,
) -> dict[str, float]:
    """The largest error of O and of each gradient over the largest value: this process's part beside one process.

    options: as the attention takes them.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    draw = torch.Generator().manual_seed(world)
    tokens, query_heads, kv_heads = 2 * world * chunk, 8, 4
    shapes = [(rows, h, tokens, head_dim) for h in (query_heads, kv_heads, kv_heads, query_heads)]
    q, k, v, do = (torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes)
    options = {"causal": True, **options}
    alone, shared = dict(options), dict(options)
    if packed:
        inside = [start for start in STARTS if start < tokens]
        cu_seqlens = torch.tensor([*inside, tokens], dtype=torch.int32)
        alone["documents"] = shared["documents"] = Documents(place_documents(cu_seqlens, tokens, q.device), tokens)
        if method == "gather":
            shared["documents"] = documents_of_chunks(cu_seqlens, tokens, rank, world)

    attend = ATTENTION[attention]
    want = gradients(partial(attend, **alone), (q, k, v), do)
    parts = [part_of(x, rank, world, method, dim=2) for x in (q, k, v, do)]
    way = partial(METHODS[method], attend, group=group, **shared)
    if compiled:
        way = torch.compile(way, backend="aot_eager", fullgraph=True)
    if recomputed:
        way = partial(recompute, way, keep=())
    got = gradients(way, parts[:3], parts[3])
    errors = {}
    for name, x in want.items():
        x = part_of(x, rank, world, method, dim=2)
        assert got[name].dtype == x.dtype, name
        errors[name] = float((got[name] - x).abs().max() / x.abs().max())
    return errors


def gradients(attend: Callable, qkv: tuple[Tensor, ...], do: Tensor) -> dict[str, Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    o = attend(*inputs)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, inputs, do)), strict=True))


def refusal_case(group: dist.ProcessGroup, method: str, attention: str = "naive", **options) -> str:
    q, k, v = (torch.zeros(1, h, 4, 16) for h in (4, 2, 2))
    try:
        METHODS[method](ATTENTION[attention], q, k, v, group=group, **{"causal": True, **options})
    except ValueError as error:
        return str(error)
    return "nothing refused"


def model_case(
    group: dist.ProcessGroup, method: str, *, rows: int = 1, packed: bool = False, twice: bool = False, **changes
) -> dict[str, float]:
    """A GPT over parts of its rows beside one process: errors of the loss, of the loss without autograd, of each
    weight's gradient; or with `twice` of a second time beside the first."""
    tokens = 24
    config = GPTConfig(num_layers=2, num_heads=4, n_embd=64, attention="naive", loss="plain", **changes)
    model = GPT(config, 50, tokens, generator=torch.Generator().manual_seed(1)).double()
    draw = torch.Generator().manual_seed(2)
    inputs, targets = (torch.randint(50, (rows, tokens), generator=draw) for _ in range(2))
    targets[:, 5] = -1
    documents = {}
    if packed:
        documents["cu_seqlens"] = torch.tensor([*STARTS, tokens], dtype=torch.int32)

    def losses_and_gradients(forward: Callable, add: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        loss = forward(inputs, targets, **documents)
        loss.backward()
        with torch.no_grad():
            found = {"loss": add(loss.detach()), "evaluated": forward(inputs, targets, **documents)}
        return found | {name: add(weight.grad.clone()) for name, weight in model.named_parameters()}

    def over_group(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    want = losses_and_gradients(model, lambda x: x)
    context = ContextParallel(group, method, tokens, torch.device("cpu"))
    with context.applied_to(model, model) as applied:
        got = losses_and_gradients(applied, over_group)
        if twice:
            want = losses_and_gradients(applied, over_group)
    return {name: float((got[name] - x).abs().max() / x.abs().max()) for name, x in want.items()}


def gpu_case(
    group: dist.ProcessGroup, method: str, *, packed: bool = False, compiled: bool = False, **options
) -> float:
    """bfloat16 through NCCL and our kernels: the largest error over what is allowed, twice one GPU's and a rounding."""
    rank, world, tokens = dist.get_rank(group), dist.get_world_size(group), 1536
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, tokens, heads, 64) for heads in (8, 4, 4, 8)]
    qkv_do = [torch.randn(s, generator=draw, device="cuda").bfloat16().transpose(1, 2) for s in shapes]
    options = {"causal": True, **options}
    alone, shared = dict(options), dict(options)
    if packed:
        cu_seqlens = torch.tensor([0, 100, 101, 700, 900, tokens], dtype=torch.int32, device="cuda")
        alone["documents"] = shared["documents"] = Documents(cu_seqlens, tokens)
        if method == "gather":
            shared["documents"] = documents_of_chunks(cu_seqlens, tokens, rank, world)
    wide = [x.double() for x in qkv_do]
    exact = gradients(partial(naive, **alone), wide[:3], wide[3])
    single = gradients(partial(flash, **alone), qkv_do[:3], qkv_do[3])
    way = partial(METHODS[method], flash, group=group, **shared)
    parts = [part_of(x, rank, world, method, dim=2) for x in qkv_do]
    got = gradients(torch.compile(way, fullgraph=True) if compiled else way, parts[:3], parts[3])
    worst = 0.0
    for name, x in exact.items():
        allowed = 2 * (single[name] - x).abs().max() + torch.finfo(torch.bfloat16).eps * x.abs().max()
        error = (got[name] - part_of(x, rank, world, method, dim=2)).abs().max()
        worst = max(worst, float(error / allowed))
    return worst


def training_case(group: dist.ProcessGroup, folder: Path, common: list[str], *runs: list[str]) -> list[dict] | None:
    """The process 0 of a run of one process and then of `runs`: each logged line, and the weights' digest."""
    store = dist.PrefixStore("training", dist.distributed_c10d._get_default_store())
    folder.mkdir(exist_ok=True)
    found = []
    for number, overrides in enumerate([[], *runs]):
        run_dir = folder / f"run_{number}"
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if number else (0, 1)
        if number or dist.get_rank(group) == 0:
            world = World(rank, size, rank, dist.PrefixStore(run_dir.as_posix(), store), group) if number else ALONE
            train(small_run(folder, *common, *overrides), run_dir, world=world)
        if dist.get_rank(group) == 0:
            weights = (run_dir / "checkpoints" / "last" / "model.safetensors").read_bytes()
            found.append({"lines": metrics(run_dir), "weights": hashlib.sha256(weights).hexdigest()})
    return found


Case = tuple[int, Callable, tuple, dict]  # processes, function, its arguments after the group


def main(folder: str) -> None:
    """Fork the processes for the cases that are in `folder`."""
    cases = pickle.loads((Path(folder) / "cases").read_bytes())
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(work, (Path(folder), store.port, cases), nprocs=PROCESSES, start_method="fork")


def work(
    rank: int, folder: Path, port: int, cases: dict[str, Case], processes: int = PROCESSES, backend: str = "gloo"
) -> None:
    """All cases, one after the other; what came of each is written to the folder."""
    torch.set_num_threads(1)
    curves.draw_run = lambda run, path: None
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    groups = {size: dist.new_group(range(size)) for size in range(1, processes + 1)}
    found = {}
    for name, (size, function, arguments, options) in cases.items():
        if rank < size:
            found[name] = function(groups[size], *arguments, **options)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
