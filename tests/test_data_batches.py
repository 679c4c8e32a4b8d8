"""What a batch holds follows from (seed, step, rank); every window comes once an epoch."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import Prefetcher, TokenBatches, document_starts, fixed_windows
from data.prefetch import LookaheadThread
from data.shards import TokenArray, open_split, token_dtype, verify, write_split


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint16)


def windows_of(batches: list[TokenBatches], steps: range) -> list[int]:
    """Window numbers in the order of the samples; tokens(n) makes them readable from a row's first token."""
    rows = [b.batch(step)[0][:, 0] for step in steps for b in batches]
    return (torch.cat(rows) // batches[0].seq_len).tolist()


def test_targets_are_inputs_moved_by_one():
    inputs, targets = TokenBatches(tokens(1000), 16, 4, seed=0).batch(3)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)


@given(st.integers(0, 2**64 - 1), st.integers(2, 400), st.integers(1, 9), st.integers(1, 7), st.integers(1, 4))
def test_each_window_once_an_epoch(seed, count, seq_len, batch_size, world_size):
    if count <= seq_len:
        return
    ranks = [
        TokenBatches(tokens(count), seq_len, batch_size, seed, rank=r, world_size=world_size) for r in range(world_size)
    ]
    per_epoch = ranks[0].windows_per_epoch
    assert per_epoch == (count - 1) // seq_len
    steps = -(-2 * per_epoch // (batch_size * world_size))  # two epochs, most of them ending inside a batch
    seen = windows_of(ranks, range(steps))
    assert sorted(seen[:per_epoch]) == list(range(per_epoch))
    assert sorted(seen[per_epoch : 2 * per_epoch]) == list(range(per_epoch))


def test_ranks_share_the_step_of_one_process():
    """Two ranks of 4 sequences see together what one process with 8 sees."""
    alone = TokenBatches(tokens(1000), 10, 8, seed=5)
    ranks = [TokenBatches(tokens(1000), 10, 4, seed=5, rank=r, world_size=2) for r in (0, 1)]
    for step in range(30):
        assert torch.equal(alone.batch(step)[0], torch.cat([r.batch(step)[0] for r in ranks]))


def test_order_depends_on_seed_and_epoch():
    first, other = (TokenBatches(tokens(1001), 10, 100, seed=s) for s in (0, 1))
    orders = [windows_of([first], range(1)), windows_of([first], range(1, 2)), windows_of([other], range(1))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_order_never_changes():
    """A run resumed under another version of this project or of numpy must go on in the same order."""
    assert windows_of([TokenBatches(tokens(101), 10, 10, seed=42)], range(1)) == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


def test_shifted_epochs_are_cut_at_other_places():
    """Each has windows that follow each other; the order is that of windows that are not shifted."""
    batches, straight = (TokenBatches(tokens(205), 10, 19, seed=3, shifted=shifted) for shifted in (True, False))
    assert (batches.windows_per_epoch, straight.windows_per_epoch) == (19, 20)
    shifts = []
    for epoch in range(100):
        inputs, targets = batches.batch(epoch)
        assert torch.equal(targets, inputs + 1)
        firsts = inputs[:, 0].sort().values
        shifts.append(int(firsts[0]))
        assert firsts.tolist() == list(range(shifts[-1], shifts[-1] + 190, 10))
    assert set(shifts) == set(range(10))
    ranks = [TokenBatches(tokens(205), 10, 2, seed=3, rank=r, world_size=2, shifted=True) for r in (0, 1)]
    whole = torch.cat([rank.batch(7)[0] for rank in ranks])
    assert torch.equal(ranks[0].whole().batch(7)[0], whole)
    with pytest.raises(AssertionError, match="too short"):
        TokenBatches(tokens(20), 10, 1, seed=0, shifted=True)


def test_resume_at_any_step():
    straight = TokenBatches(tokens(500), 7, 6, seed=3)
    expected = [straight.batch(step) for step in range(40)]
    for step in (0, 1, 11, 12, 39):
        fresh = TokenBatches(tokens(500), 7, 6, seed=3).batch(step)
        assert torch.equal(fresh[0], expected[step][0])
        assert torch.equal(fresh[1], expected[step][1])
    assert torch.equal(straight.batch(2)[0], expected[2][0]), "going back is allowed too"


def test_batch_larger_than_the_split():
    seen = windows_of([TokenBatches(tokens(41), 10, 10, seed=0)], range(2))
    assert [sorted(seen[i : i + 4]) for i in range(0, 20, 4)] == [[0, 1, 2, 3]] * 5


def test_what_no_batches_can_be_of():
    """A text that is too short was refused where it was opened (test_data_prepare.py)."""
    with pytest.raises(AssertionError, match="too short"):
        TokenBatches(tokens(10), 10, 1, seed=0)
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"seed={seed} must lie"):
            TokenBatches(tokens(100), 10, 1, seed=seed)


@given(st.integers(2, 500), st.integers(1, 20), st.integers(1, 50))
def test_fixed_windows_are_spread_and_disjoint(count, seq_len, wanted):
    if count <= seq_len:
        return
    inputs, targets = fixed_windows(tokens(count), seq_len, wanted)
    assert len(inputs) == min(wanted, (count - 1) // seq_len)
    assert torch.equal(targets, inputs + 1)
    gaps = inputs[:, 0].diff()
    assert (gaps >= seq_len).all()
    if len(gaps):
        assert gaps.max() - gaps.min() <= seq_len
        assert count - inputs[-1, 0] <= gaps.max() + 2 * seq_len, "the last one is near the end"


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(-30, 30), st.integers(-30, 30))
def test_token_array_is_one_array(lengths, start, stop):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    array = TokenArray(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [], np.uint16)
    assert len(array) == len(whole)
    assert np.array_equal(array[start:stop], whole[start:stop])
    assert array[start:stop].dtype == np.uint16


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (200_019, "<u4")])
def test_shards_hold_every_id(vocab_size, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("data.shards.SHARD_TOKENS", 10)
    assert token_dtype(vocab_size) == np.dtype(dtype)
    ids = np.linspace(0, vocab_size - 1, 34).astype(np.uint32)
    shards = write_split(tmp_path, "train", token_dtype(vocab_size), np.split(ids, [1, 1, 25]))
    assert [shard["tokens"] for shard in shards] == [10, 10, 10, 4]
    verify(tmp_path, shards, token_dtype(vocab_size))
    assert np.array_equal(open_split(tmp_path, shards, token_dtype(vocab_size))[:], ids)
    # batches across shard borders
    inputs, targets = fixed_windows(open_split(tmp_path, shards, token_dtype(vocab_size)), 11, 3)
    assert inputs.flatten().tolist() == ids[:33].tolist()
    assert targets.flatten().tolist() == ids[1:].tolist()


def test_prefetcher_on_the_cpu_is_the_batches():
    batches = TokenBatches(tokens(500), 7, 6, seed=3)
    with Prefetcher(batches, 5, "cpu") as prefetcher:
        for step in range(5, 30):
            inputs, targets, starts = next(prefetcher)
            assert starts is None
            assert torch.equal(inputs, batches.batch(step)[0])
            assert torch.equal(targets, batches.batch(step)[1])


def test_a_document_starts_at_the_token_that_ends_the_one_before():
    inputs = torch.tensor([[5, 6, 9, 7], [9, 9, 5, 5], [5, 5, 5, 9]])
    assert document_starts(inputs, end_of_text=9).tolist() == [0, 2, 4, 5, 8, 11]
    batches = TokenBatches(tokens(500) % 5, 7, 6, seed=3)
    with Prefetcher(batches, 2, "cpu", end_of_text=3) as prefetcher:
        inputs, _, starts = next(prefetcher)
    assert torch.equal(inputs, batches.batch(2)[0])
    assert torch.equal(starts, document_starts(inputs, 3))
    assert starts.dtype == torch.int32


def test_ahead_keeps_order_and_leaves_no_thread():
    made = []
    ahead = LookaheadThread(lambda step: made.append(step) or step * step, 3)
    assert [ahead.take() for _ in range(50)] == [step * step for step in range(3, 53)]
    ahead.close()
    assert made in [list(range(3, end)) for end in (53, 54, 55)], "no more than two ahead"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_ahead_raises_what_the_thread_raised():
    def make(step):
        if step == 2:
            raise ValueError("shard is gone")
        return step

    ahead = LookaheadThread(make, 0)
    assert [ahead.take(), ahead.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="shard is gone"):
            ahead.take()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.gpu
def test_prefetcher_on_cuda_is_the_batches():
    batches = TokenBatches(tokens(60_000), 64, 32, seed=3)
    expected = [TokenBatches(tokens(60_000), 64, 32, seed=3).batch(step) for step in range(5, 205)]
    with Prefetcher(batches, 5, "cuda") as prefetcher:
        for inputs, targets in expected:
            on_gpu = next(prefetcher)
            torch.cuda._sleep(100_000)  # the step still runs while the next batch is being copied
            assert on_gpu[0].device.type == "cuda"
            assert torch.equal((on_gpu[0] * 1).cpu(), inputs)
            assert torch.equal((on_gpu[1] * 1).cpu(), targets)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.gpu
def test_no_graph_is_captured_on_the_stream_of_copies():
    """Whoever captures asks for a stream, and after 32 PyTorch gives the first one again."""
    with Prefetcher(TokenBatches(tokens(60_000), 64, 32, seed=3), 0, "cuda") as prefetcher:
        others = {torch.cuda.Stream().cuda_stream for _ in range(64)}
        assert prefetcher._stream.cuda_stream not in others
