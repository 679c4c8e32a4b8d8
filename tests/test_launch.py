"""Launches: run through Triton the first time, replayed afterwards, each address in its place; keys and plans."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels import flash_attention, flash_attention_varlen, launch, naive_attention
from kernels.call import Options, key_of
from kernels.launch import Launch, Plan, plan_of, run, sizes_described, tma_ready
from kernels.portable.forward import launch_flash_fwd
from kernels.replay import KEPT, Repeated, Replay, tensors_in
from tests.attention_checks import make_packed, make_qkv

PLAIN = Options(causal=True, scale=0.5)


class Kernel:
    """Stands for a Triton kernel; keeps what Triton and its C entry point were given."""

    def __init__(self):
        self.first, self.again = [], []

    def __getitem__(self, grid):
        def first(*arguments, **named):
            self.first.append((grid, arguments, named))
            self.arg_names = [*(f"parameter{i}" for i in range(len(arguments))), *named]
            return self.compiled()

        return first

    def entry(self, *arguments):
        self.again.append(arguments)

    def compiled(self):
        """What Triton's compiler returns, as far as a replay reads it."""
        runner = SimpleNamespace(
            launch=partial(self.entry),
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid="all or none",
            launch_pdl="early",
        )
        metadata = SimpleNamespace(tensordesc_meta=["how to encode"])
        return SimpleNamespace(run=runner, function="kernel", packed_metadata="warps", metadata=metadata)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(launch, "PLANS", {})
    return Kernel()


def at(count: int, offset: int = 0) -> list[torch.Tensor]:
    """Tensors whose addresses are multiples of 16, or so many bytes behind."""
    return [torch.zeros(64, dtype=torch.int8)[offset : offset + 32] for _ in range(count)]


def described_tensor(x):
    return SimpleNamespace(base=x, shape=[4, 8], strides=[8, 1], block_shape=[2, 8], padding="zero")


def test_each_address_goes_to_its_place(kernel, monkeypatch):
    encoded = []
    monkeypatch.setattr(
        "triton.backends.nvidia.driver.make_tensordesc_arg",
        lambda at, how: encoded.append((at.base.data_ptr(), how)) or [f"map of {at.base.data_ptr()}"],
    )

    def launches(a, b, c, d):
        return [Launch(kernel, 12, (described_tensor(a), b, (1, 2), 3, (None, c, 0.5, d)), {"X": "constexpr"}, {})]

    plan, calls = Plan(), [at(4) for _ in range(2)]
    calls.append([calls[0][0], *calls[1][1:]])
    for a, b, c, d in calls:
        run(plan, {"d": d, "b": b, "a": a, "c": c}, launches)
    assert len(kernel.first) == 1
    head = (12, 1, 1, 77, "kernel", "all or none", "early", None, None, "warps", None, None, None)
    addresses = [[x.data_ptr() for x in tensors] for tensors in calls[1:]]
    assert kernel.again == [
        (*head, f"map of {a}", 4, 8, 8, 1, b, (1, 2), 3, (None, c, 0.5, d), "constexpr") for a, b, c, d in addresses
    ]
    assert encoded == [(address[0], "how to encode") for address in addresses], "each address once"


def test_numbers_that_a_call_gives_go_to_their_parameters(kernel):
    plan, (x, y) = Plan(), at(2)
    for tensor, number in ((x, 3), (y, 5)):
        launches = lambda x, number=number: [Launch(kernel, 1, (2, number, x), {}, {})]  # noqa: E731
        run(plan, {"x": tensor}, launches, parameter1=number)
    assert len(kernel.first) == 1
    assert kernel.again[0][-3:] == (2, 5, y.data_ptr())


@pytest.fixture
def encoded(monkeypatch):
    """(address, shape, strides) of each descriptor that was encoded for a replay."""
    found = []

    def encode(at, how):
        found.append((at.base.data_ptr(), at.shape, at.strides))
        return [f"map {len(found)}"]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode)
    return found


def test_descriptors_of_other_sizes_are_encoded_once_for_each(kernel, encoded):
    """A cache grows, and its memory stays where it is: an address alone does not say which descriptor is meant."""
    plan, (x, y) = Plan(), at(2)
    short, long = ((4, 8), (8, 1)), ((6, 8), (16, 1))
    for tensor, sizes in ((x, short), (x, short), (x, long), (y, long), (x, long), (x, short)):
        run(plan, {"x": tensor}, lambda x: [Launch(kernel, 1, (described_tensor(x),), {}, {})], parameter0=sizes)
    near, far = x.data_ptr(), y.data_ptr()
    assert encoded == [(near, [4, 8], [8, 1]), (near, [6, 8], [16, 1]), (far, [6, 8], [16, 1])]
    assert [call[13] for call in kernel.again] == ["map 1", "map 2", "map 3", "map 2", "map 1"]
    ((_, (first,), _),) = kernel.first
    assert first.base.data_ptr() == near, "what Triton was given is as it was"
    assert (first.shape, first.strides) == ([4, 8], [8, 1])


def replay_of(*arguments, kernel, named, numbers=()):
    kernel[1](*arguments)
    return Replay(kernel.compiled(), Launch(kernel, 1, arguments, {}, {}), named, numbers)


def test_a_replay_keeps_no_tensor_of_the_first_call(kernel):
    """It lives as long as the process, and its tensors are a user's."""
    a, b = at(2)
    replay = replay_of(a, (1, b, None), kernel=kernel, named=["a", "b"])
    assert list(tensors_in(tuple(replay._arguments))) == []


def test_encoded_descriptors_do_not_grow_for_ever(kernel, encoded):
    """Each new cache has an address of its own; nor is the first call's tensor kept alive."""
    (x,) = at(1)
    replay = replay_of(described_tensor(x), kernel=kernel, named=["x"])
    ((*_, maps),) = replay._slots
    for address in range(0, 16 * (KEPT + 10), 16):
        replay(77, {"x": address})
    assert len(encoded) == KEPT + 10
    assert len(maps) <= KEPT
    assert maps._descriptor.base is None


@pytest.mark.parametrize("kind", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_that_wants_scratch_memory_is_not_replayed(kernel, kind):
    """A replay gives none: the kernel would write to address 0."""
    compiled = kernel.compiled()
    setattr(compiled.run, kind, 8)
    with pytest.raises(AssertionError):
        Replay(compiled, Launch(kernel, 1, (), {}, {}), [])


def test_the_entry_of_a_kernel_with_descriptors_is_behind_tritons_loop(kernel):
    def wrapped(launcher, tensordesc_meta):
        return lambda *arguments: launcher(arguments, tensordesc_meta)  # encodes each, in Triton

    compiled = kernel.compiled()
    compiled.run.launch = wrapped(kernel.entry, ["how to encode"])
    kernel[1](3)
    Replay(compiled, Launch(kernel, 1, (3,), {}, {}), [])(77, {})
    assert kernel.again[0][-1] == 3
    assert kernel.again[0][3] == 77


@pytest.fixture
def repeated(kernel, monkeypatch):
    """A call (q, bounds, n) of which q changes, and the current device and stream, which may."""
    now = SimpleNamespace(device=-1, stream=77)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    q, bounds, scratch = at(3)
    how = {"kernel": kernel, "named": ["q", "bounds"], "numbers": ["parameter2"]}
    replays = [replay_of(q, bounds, 3, **how) for _ in range(2)]
    return Repeated(replays, {"bounds": bounds, "scratch": scratch, "absent": None}, {"parameter2": 5}), bounds, now


def test_a_repeated_call_runs_all_its_kernels_on_the_tensors_that_change(repeated, kernel):
    call, bounds, _ = repeated
    first, second = at(2)
    assert call(q=first) is True
    assert call(q=second) is True
    expected = [(x.data_ptr(), bounds.data_ptr(), 5) for x in (first, first, second, second)]
    assert [call[-3:] for call in kernel.again] == expected
    assert {call[3] for call in kernel.again} == {77}
    with pytest.raises(KeyError):  # not the call's before
        call()


def test_a_repeated_call_that_another_stream_or_device_or_address_would_break_does_not_run(repeated, kernel):
    call, _, now = repeated
    (aligned,), (odd,) = at(1), at(1, 8)
    assert call(q=odd, more=aligned) is False
    now.stream = 78
    assert call(q=aligned) is False
    now.stream, now.device = 77, 1
    assert call(q=aligned) is False
    now.device = -1
    assert kernel.again == []
    assert call(q=aligned) is True


def test_a_repeated_call_keeps_what_it_shares(repeated):
    """Its addresses would be anybody's once the tensors are gone."""
    call, bounds, _ = repeated
    assert len(call._kept) == 2
    assert call._kept[0] is bounds


def test_a_tensor_given_twice_has_two_places(kernel):
    """Three names of one tensor at first must not become one for ever."""

    def launches(q, k):
        return [Launch(kernel, 1, (k, q, k), {}, {})]

    plan, (x, y, z) = Plan(), at(3)
    run(plan, {"q": x, "k": x}, launches)
    run(plan, {"q": y, "k": z}, launches)
    assert kernel.again[0][-3:] == (z.data_ptr(), y.data_ptr(), z.data_ptr())


def test_a_launch_takes_no_tensor_but_the_calls_own(kernel):
    x, y = at(2)
    with pytest.raises(AssertionError, match="takes a tensor that the call does not name"):
        run(Plan(), {"x": x}, lambda x: [Launch(kernel, 1, (x, y), {}, {})])
    with pytest.raises(AssertionError, match="takes a tensor that the call does not name"):
        run(Plan(), {"x": x}, lambda x: [Launch(kernel, 1, (x[1:],), {}, {})])


def test_an_unaligned_address_is_neither_replayed_nor_remembered(kernel):
    plan = Plan()

    def call(offset):
        run(plan, {"x": at(1, offset)[0]}, lambda x: [Launch(kernel, 1, (x,), {}, {})])
        return len(kernel.first), len(kernel.again)

    assert call(8) == (1, 0)
    assert call(0) == (2, 0)
    assert call(0) == (2, 1)
    assert call(8) == (3, 1)
    assert call(0) == (3, 2)


def test_what_the_interpreter_ran_is_not_remembered(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "compiled", lambda: None)
    plan = Plan()
    for _ in range(2):
        run(plan, {"x": at(1)[0]}, lambda x: [Launch(kernel, 1, (x,), {}, {})])
    assert len(kernel.first) == 2
    assert plan.replays is None


def test_the_table_of_plans_does_not_grow_for_ever(kernel):
    first = plan_of(("a", 0))
    assert plan_of(("a", 0)) is first
    for i in range(600):
        plan_of(("b", i))
    assert len(launch.PLANS) < 600


def test_keys_tell_apart_what_compiles_or_runs_differently():
    def tensor(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16)

    x, odd = tensor(1, 2, 8, 16), tensor(257)[1:].view(1, 2, 8, 16)
    keys = [
        key_of("forward", PLAIN, x, x),
        key_of("forward", PLAIN._replace(causal=False), x, x),
        key_of("forward", PLAIN._replace(scale=0.25), x, x),
        key_of("forward", PLAIN._replace(sinks=torch.zeros(2)), x, x),
        key_of(("forward", "tile"), PLAIN, x, x),
        key_of("forward", PLAIN, x, tensor(1, 1, 8, 16)),
        key_of("forward", PLAIN, x, tensor(1, 8, 2, 16).transpose(1, 2)),
        key_of("forward", PLAIN, x.half(), x),
        key_of("forward", PLAIN, x, x.half()),
        key_of("forward", PLAIN, x.to("meta"), x),
        key_of("forward", PLAIN, tensor(1, 2, 16, 8).transpose(2, 3), x),
        key_of("forward", PLAIN, odd, x),
        key_of("forward", PLAIN, x, odd),
        key_of("forward", PLAIN, odd, odd),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of("forward", PLAIN, x.clone(), x) == keys[0]
    slopes = [PLAIN._replace(alibi_slopes=torch.zeros(shape)) for shape in ((1, 2), (3, 2), (1, 2))]
    first, other, again = (key_of("forward", options, x, x) for options in slopes)
    assert first == again != other


def test_what_tma_can_address():
    """Strides of whole 16 bytes; that of a dimension of size 1 is used by nobody, and described by another."""
    half = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    row = half(2, 25604)[:, :25600].view(2, 4, 100, 64)
    assert tma_ready(half(2, 4, 100, 72)[..., :64])
    assert tma_ready(half(2, 100, 4, 64).transpose(1, 2))
    assert not tma_ready(row)
    assert tma_ready(row[:1])
    assert not tma_ready(half(2, 4, 100, 68)[..., :64])
    assert not tma_ready(half(1, 1, 100, 64).expand(1, 4, -1, -1))
    assert not tma_ready(half(1, 4, 64, 100).transpose(2, 3))
    assert tma_ready(torch.empty(1, 4, 100, 68, device="meta")[..., :64])  # 272 bytes
    shape, (batch, *strides) = sizes_described(row[:1])
    assert (shape, strides) == ((1, 4, 100, 64), [6400, 64, 1])
    assert batch % 8 == 0


def gradients(qkv: tuple, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of O, or of O and the LSE, where these are given."""
    results = flash_attention(*qkv, causal=True, return_lse=True)
    return torch.autograd.grad(results[: len(given)], qkv, given)


def test_a_backward_of_the_lse_too_has_a_plan_of_its_own(monkeypatch):
    """A replay of the other one would leave the LSE's gradient out."""
    monkeypatch.setattr(launch, "PLANS", {})
    qkv = make_qkv(1, 2, 1, 20, 20, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    given, counts = (torch.ones_like(qkv[0]), qkv[0].new_ones(1, 2, 20)), []
    for number in (1, 2, 1, 2):
        gradients(qkv, *given[:number])
        counts.append(len(launch.PLANS))
    assert counts == [2, 3, 3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_a_replayed_backward_has_the_gradients_that_are_asked_for(dtype, monkeypatch):
    monkeypatch.setattr(launch, "PLANS", {})
    qkv = make_qkv(1, 2, 1, 100, 130, 64, dtype=dtype, device="cuda")
    given = torch.randn_like(qkv[0]), torch.randn(1, 2, 100, device="cuda")
    alone, both = gradients(qkv, given[0]), gradients(qkv, *given)
    launch.PLANS.clear()  # and then in the other order
    assert all(map(torch.equal, gradients(qkv, *given), both))
    assert all(map(torch.equal, gradients(qkv, given[0]), alone))
    assert not torch.equal(alone[0], both[0])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_a_replay_gives_what_the_first_launch_gives(packed):
    """Other inputs of the same description, then the first ones again: the same bits as the first time."""
    options = {"causal": True, "dropout_p": 0.1, "dropout_seed": 3, "sinks": torch.tensor([0.5, -0.5], device="cuda")}

    def run(seed):
        kind = {"dtype": torch.bfloat16, "device": "cuda", "seed": seed}
        if packed:
            qkv, arguments = make_packed([90, 0, 38], [90, 0, 38], 2, 1, 64, **kind)
            o, lse = flash_attention_varlen(*qkv, **arguments, **options, return_lse=True)
        else:
            qkv = make_qkv(1, 2, 1, 100, 130, 64, **kind)
            o, lse = flash_attention(*qkv, **options, return_lse=True)
        return o, lse, *torch.autograd.grad(o.float().square().sum() + lse[lse > -1e9].sum(), qkv)

    launch.PLANS.clear()
    first = run(0)
    assert [plan.replays is not None for plan in launch.PLANS.values()] == [True, True]
    run(1)
    assert len(launch.PLANS) == 2
    for a, b in zip(first, run(0), strict=True):
        assert torch.equal(a, b)
    launch.PLANS.clear()
    for a, b in zip(first, run(0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_gpu_an_unaligned_view_after_an_aligned_one():
    whole = torch.randn(1, 2, 65, 64, dtype=torch.bfloat16, device="cuda").flatten()
    aligned, odd = (whole[i : i + 2 * 64 * 64].view(1, 2, 64, 64) for i in (0, 1))
    launch.PLANS.clear()
    alone = flash_attention(odd, odd, odd)
    launch.PLANS.clear()
    first = flash_attention(aligned, aligned, aligned)
    assert torch.equal(flash_attention(odd, odd, odd), alone)
    assert torch.equal(flash_attention(aligned, aligned, aligned), first)
    # an aligned copy may take another kernel, whose roundings are its own
    torch.testing.assert_close(flash_attention(*[odd.clone()] * 3), alone)


@pytest.mark.parametrize("documents", [False, True])
def test_what_would_be_launched_is_recorded_without_memory(documents):
    """The launchers' own launches, on meta tensors; afterwards kernels run again."""
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16)
    starts = torch.tensor([0, 8, 40], dtype=torch.int32) if documents else None
    options = PLAIN._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    with launch.recorded() as launches:
        o, lse = launch_flash_fwd(*(x.to("meta") for x in (q, k, v)), options)
    assert (o.shape, lse.shape, o.device.type) == (q.shape, q.shape[:3], "meta")
    assert [one.grid for one in launches] == [2, 2 * 4] if documents else [2 * 3]
    assert launches[-1].constants["CAUSAL"]
    o, _ = launch_flash_fwd(q, k, v, options)
    if not documents:
        torch.testing.assert_close(o, naive_attention(q, k, v, causal=True, scale=PLAIN.scale))


def test_heads_between_a_heads_tokens_are_not_counted_as_its_own(monkeypatch):
    """A padded cache (B, H, N, D) as one row of tokens fills as much of the L2 cache as the cache does."""
    monkeypatch.setattr(launch, "l2_bytes", lambda _: 50 * 2**20)
    q = torch.empty(1, 32, 16384, 64, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(4, 8, 4096, 64, dtype=torch.bfloat16, device="meta")
    row = cache.as_strided((1, 8, 3 * 8 * 4096 + 4096, 64), (0, *cache.stride()[1:]))
    together = launch.heads_per_section(q, cache.transpose(0, 1).reshape(1, 8, 16384, 64))
    assert launch.heads_per_section(q, row) == together == 16


def test_a_key_that_a_large_batch_shares_has_heads_too():
    """Of 512 rows that all read the same 128 bytes, each has less than one."""
    q, key = torch.empty(512, 1, 2, 16), torch.empty(1, 1, 1, 16)
    assert launch.heads_per_section(q, key.expand(512, -1, -1, -1)) == 1


def test_threads_take_turns():
    """Triton's interpreter keeps the place in the grid in globals, where two would write over each other."""
    q, k, v = make_qkv(1, 2, 1, 70, 70, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    expected = flash_attention(q, k, v, causal=True)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: flash_attention(q, k, v, causal=True), range(16)):
            assert torch.equal(found, expected)
