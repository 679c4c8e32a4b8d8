"""Masks that are no range of keys in transformers' models with our attention: pairs, their mask functions, holes."""

import ast
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")

from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from transformers import masking_utils  # noqa: E402

from kernels import BlockMask  # noqa: E402
from model import huggingface, huggingface_masks  # noqa: E402
from tests.huggingface_models import (  # noqa: E402
    ENCODERS,
    GROUPED,
    LAYERS,
    VOCAB,
    N,
    build,
    close,
    padding,
    pytorch_on_a_cpu,
    tokens,
    with_each,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SDPA = r'use set_attn_implementation\("sdpa"\), or "eager" where the model has no sdpa'
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for a CPU")


@pytest.fixture
def in_pytorch(monkeypatch):
    pytorch_on_a_cpu(monkeypatch)


@pytest.fixture
def builds(monkeypatch):
    """Block masks that were built, a shape each."""
    found, build = [], BlockMask.from_dense

    def count(visible):
        found.append(tuple(visible.shape))
        return build(visible)

    monkeypatch.setattr(BlockMask, "from_dense", count)
    return found


def prefixes(rows=3):
    """Pairs (B, 1, N, N): causal, but for a prefix of each row that is seen both ways, and a key that nobody sees."""
    q, k = torch.arange(N)[:, None], torch.arange(N)
    pairs = (k <= q) | (k < torch.tensor([0, 5, 12])[:rows, None, None, None])
    pairs[..., 15] = False
    pairs[..., 15, 15] = True
    return pairs


def added(pairs, hidden=-1e30):
    return torch.where(pairs, 0.0, hidden)


def step(model, **given):
    """(logits, the gradients of all parameters)"""
    model.zero_grad()
    more = {} if type(model).__name__.endswith("MaskedLM") else {"use_cache": False}
    logits = model(tokens().to(model.device), **given, **more).logits
    (logits * torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "GptOss", "Bert"])  # soft-cap, sinks, groups, both ways
def test_pairs_are_what_eager_adds(family, in_pytorch, builds):
    """As eager takes them and as booleans, with gradients; blocks are built once for all layers."""
    model, pairs = build(family), prefixes()
    theirs, ours = with_each(model, step, attention_mask=added(pairs))
    assert builds == [(3, 1, N, N)]
    as_booleans = step(model, attention_mask=pairs)
    assert len(builds) == 2
    for found in (ours, as_booleans):
        close(theirs[0], found[0])
        close(theirs[1], found[1], 2e-5)
    step(model, attention_mask=pairs)
    assert len(builds) == 2
    pairs[..., 0, 1] = True  # the same tensor, written to
    step(model, attention_mask=pairs)
    assert len(builds) == 3


@INTERPRETED
def test_pairs_in_the_interpreter():
    model = build("Llama", num_hidden_layers=1)
    theirs, ours = with_each(model, step, attention_mask=added(prefixes(), -torch.inf))
    close(theirs[0], ours[0])
    close(theirs[1], ours[1], 2e-5)


def test_pairs_that_change_in_inference_mode(in_pytorch, builds):
    """It counts no versions."""
    model = build("Llama", num_hidden_layers=1)
    with torch.inference_mode():
        pairs = added(prefixes())
        for key in (3, 5, 7):
            close(*with_each(model, lambda model: model(tokens(), attention_mask=pairs).logits))
            pairs[..., key] = -1e30
        model(tokens(), attention_mask=pairs)
        model(tokens(), attention_mask=pairs)
    assert len(builds) == 4


def test_a_pair_is_hidden_by_as_little_as_hides_it(in_pytorch):
    """Older models add -10,000."""
    theirs, ours = with_each(build("Llama"), step, attention_mask=added(prefixes(), -1e4))
    close(theirs[0], ours[0])


def test_pairs_that_are_the_same_for_all_queries(in_pytorch):
    """What a (B, 1, 1, N) mask broadcasts to, here of an encoder."""
    mask = added(padding("right").bool()[:, None, None])
    theirs, ours = with_each(build("Bert"), step, attention_mask=mask)
    close(theirs[0][padding("right").bool()], ours[0][padding("right").bool()])


def test_pairs_for_any_number_of_queries_serve_calls_of_several(in_pytorch):
    mask, k = padding("right").bool()[:, None, None], torch.randn(3, 4, N, 16)
    every, few = (huggingface.attention(torch.nn.Identity(), k[:, :, :n], k, k, mask)[0] for n in (N, 5))
    close(every[:, :5], few)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Gemma2", "GptOss", "Bert"])
def test_pairs_on_a_gpu(family, builds):
    """As near as their eager attention, and no wait where the blocks are known."""
    pairs, found = prefixes().cuda(), {}
    for name, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), (huggingface.NAME, torch.bfloat16)):
        model = build(family).to("cuda", dtype)
        model.set_attn_implementation(name)
        mask = pairs if name == huggingface.NAME else added(pairs).to(dtype)
        found[name, dtype] = step(model, attention_mask=mask)
    exact, theirs, ours = found.values()
    for right, eager, it in zip(exact, theirs, ours, strict=True):
        assert (it - right).norm() <= 2 * (eager - right).norm()
    assert len(builds) == 1
    if family != "GptOss":  # whose experts wait
        ids, more = tokens().cuda(), {} if family in ENCODERS else {"use_cache": False}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids, attention_mask=pairs, **more)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_torchs_block_mask(in_pytorch):
    """Not against eager, which does not take it, but against the same pairs."""
    starts = torch.tensor([0, 5, 12])
    mask = create_block_mask(lambda b, h, q, k: (k <= q) | (k < starts[b]), 3, None, N, N, device="cpu")
    dense = torch.arange(N) <= torch.arange(N)[:, None]
    dense = dense | (torch.arange(N) < starts[:, None, None, None])
    model = build("Llama")
    model.set_attn_implementation(huggingface.NAME)
    with torch.no_grad():
        found = [model(tokens(), attention_mask=x, use_cache=False).logits for x in (mask, dense)]
    assert torch.equal(*found)


# --- their mask functions


SIGHT = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4,
         "patch_size": 2, "vision_use_head": False, "projection_dim": 64}  # fmt: skip


def sees(family):
    """A tiny Gemma 3 or PaliGemma, whose images, a prefix there, are seen both ways."""
    torch.manual_seed(0)
    if family == "Gemma3":
        text = transformers.Gemma3TextConfig(**GROUPED | LAYERS | {"query_pre_attn_scalar": 16})
        config = transformers.Gemma3Config(text_config=text, vision_config=SIGHT, image_token_index=VOCAB - 1)
    else:
        text = transformers.GemmaConfig(**GROUPED).to_dict()
        vision = SIGHT | {"model_type": "siglip_vision_model"}
        config = transformers.PaliGemmaConfig(
            text_config=text, vision_config=vision, projection_dim=64, image_token_index=VOCAB - 1
        )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("family", ["Gemma3", "PaliGemma"])
def test_images_that_are_seen_both_ways(family, in_pytorch, builds):
    kinds = torch.zeros(3, N, dtype=torch.int64)
    if family == "Gemma3":  # two images in the second row
        kinds[:, 9:13] = kinds[1, 15:19] = 1
    else:  # 0 is the prefix
        kinds[:, 12:] = 1
    mask = padding("left", rows=3)
    batch = {"input_ids": tokens() % (VOCAB - 1), "attention_mask": mask, "token_type_ids": kinds}

    def run(model):
        with torch.no_grad():
            logits = model(**batch).logits[mask.bool()]
        del builds[:]
        return logits, model.generate(**batch, max_new_tokens=4, do_sample=False)

    theirs, ours = with_each(sees(family), run)
    close(theirs[0], ours[0])
    assert torch.equal(theirs[1], ours[1])
    assert len(builds) == {"Gemma3": 2, "PaliGemma": 1}[family]  # kinds of layer, in the prompt alone


def some(batch, head, q, k):
    return (k < 4) | (k % 5 == 0)


def bidirectional_mask_function(batch, head, q, k):
    """A user's function with a name of theirs."""
    return some(batch, head, q, k)


HOW = {
    "or": ("create_causal_mask", {"or_mask_function": some}),
    "or, of parts that ranges say": (
        "create_causal_mask",
        {"or_mask_function": masking_utils.sliding_window_bidirectional_overlay(4)},
    ),
    "and": ("create_sliding_window_causal_mask", {"and_mask_function": some}),
    "and, with a name of theirs": ("create_causal_mask", {"and_mask_function": bidirectional_mask_function}),
    "blocks": ("create_causal_mask", {"block_sequence_ids": torch.arange(N).expand(3, -1) // 4 - 1}),
    "chunks": ("create_chunked_causal_mask", {}),
    "packed": ("create_causal_mask", {"or_mask_function": some, "position_ids": torch.arange(N).expand(3, -1) % 9}),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_parts_that_no_range_says_become_pairs(how, padded):
    """The pairs are those of their sdpa, with padding and packed documents in them."""
    name, given = HOW[how]
    config = build("Mistral").config
    config.attention_chunk_size = 4
    config.is_encoder_decoder = False
    mask, found = padding("left") if padded and how != "packed" else None, []
    for config._attn_implementation in ("sdpa", huggingface.NAME):
        found.append(getattr(masking_utils, name)(config, torch.zeros(3, N, 64), mask, None, **given))
    assert found[1].dtype == torch.bool
    assert torch.equal(*found)


# --- holes


def holes():
    mask = padding("left")
    mask[0, 4] = mask[2, 8:10] = 0
    return mask


@pytest.mark.parametrize("family", ["Llama", "Mistral", *ENCODERS])
def test_a_hole_on_a_cpu(family, in_pytorch):
    def run(model):
        logits, gradients = step(model, attention_mask=holes())
        text = model.generate(tokens(), attention_mask=holes(), max_new_tokens=4, do_sample=False)
        return logits[holes().bool()], gradients, text

    def both_ways(model):
        with torch.no_grad():
            return (model(tokens(), attention_mask=holes()).logits[holes().bool()],)

    model = build(family)
    theirs, ours = with_each(model, both_ways if family in ENCODERS else run)
    close(theirs[0], ours[0])
    if family not in ENCODERS:
        assert torch.equal(theirs[2], ours[2])


def reported(*holes):
    """Checks that a GPU is done with."""
    return [(SimpleNamespace(query=lambda: True), torch.tensor(hole)) for hole in holes]


def test_a_hole_that_a_gpu_has_found_is_refused_in_one_line(monkeypatch):
    pending = (SimpleNamespace(query=lambda: False), torch.tensor(True))
    monkeypatch.setattr(huggingface_masks, "_CHECKS", [*reported(False, False), pending])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which needs a driver
    huggingface.mask(1, N, N)  # nobody waits for what is not done
    assert [pending] == huggingface_masks._CHECKS
    q = torch.zeros(1, 4, N, 16)
    for call in (lambda: huggingface.mask(1, N, N), lambda: huggingface.attention(torch.nn.Identity(), q, q, q, None)):
        huggingface_masks._CHECKS[:] = reported(False, True)
        with pytest.raises(ValueError, match=rf"^attention_mask has a hole, .*pad at the ends, .*{SDPA}$") as error:
            call()
        assert "\n" not in str(error.value)
        assert huggingface_masks._CHECKS == []


def test_rows_with_a_hole_are_nan_on_a_gpu(in_pytorch):
    """The first layer that takes the mask makes them so."""
    q, mask = torch.randn(3, 4, N, 16), huggingface.mask(3, N, N, attention_mask=padding("left").bool())
    first = huggingface.attention(torch.nn.Identity(), q, q, q, mask)[0]
    huggingface_masks._DERIVED[mask][1]["holes"] = [torch.tensor([False, False, True])]
    second, third = (huggingface.attention(torch.nn.Identity(), q, q, q, mask)[0] for _ in range(2))
    assert second[2, 3:].isnan().all()
    assert torch.equal(first[:2], second[:2])
    assert torch.equal(first, third)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_a_hole_on_a_gpu(family):
    """NaN at its row's tokens, no wait, one line as soon as the GPU has said so; what follows is as before."""
    model, ids = build(family).cuda(), tokens().cuda()
    model.set_attn_implementation(huggingface.NAME)
    right, wrong = padding("left").cuda(), padding("left").cuda()
    wrong[2, 8] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=right).logits
        torch.cuda.synchronize()
        torch.cuda._sleep(2**28)  # cycles that the host runs ahead: nothing is reported within the call
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = model(ids, attention_mask=wrong).logits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert found[2, right[2].bool()].isnan().all()
        assert torch.equal(found[:2], expected[:2])
        with pytest.raises(ValueError, match="attention_mask has a hole"):
            model(ids, attention_mask=right)
        assert torch.equal(model(ids, attention_mask=right).logits, expected)


# --- refusals


@pytest.mark.parametrize(("mask", "match"), [
    (torch.ones(3, 1, N, N).long(), rf"reached a layer with shape \(3, 1, 21, 21\) and torch.int64; .*{SDPA}"),
    (torch.full((3, 1, N, N), -0.5), rf"adds other numbers than 0 and -10000 or less to the scores, .*{SDPA}"),
    (torch.full((3, 1, N, N), 0.5), rf"adds other numbers than 0 and -10000 or less to the scores, .*{SDPA}"),
    (torch.ones(3, 1, N, N + 1, dtype=torch.bool), "block_mask is of 21 x 22 tokens; q and k have 21 x 21"),
])  # fmt: skip
def test_other_masks_are_refused(mask, match, in_pytorch):
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match=match) as error:
        model(tokens(), attention_mask=mask)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_mask_with_other_rows_than_the_batch_is_refused(rows, in_pytorch):
    """Rows of the batch that it lacked were not computed, and nothing said so."""
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match=f"^attention_mask has {rows} rows and the batch 3; give one for each$"):
        model(tokens(), attention_mask=padding("left").repeat(2, 1)[:rows])


def test_every_model_that_computes_with_its_mask_is_named():
    """In transformers' own text: a layer adds the mask to scores of its own, or to another mask, or widens it."""
    computes, found = re.compile(r"\battention_mask [+&] |[+&] attention_mask\b|F\.pad\(attention_mask, \(0, kv"), set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text()
        if "ALL_ATTENTION_FUNCTIONS" in text and "masking_utils" in text:  # others gpt_triton cannot reach
            layers = [
                part for part in ast.parse(text).body if isinstance(part, ast.ClassDef) and "For" not in part.name
            ]
            if any(computes.search(ast.unparse(layer)) for layer in layers):
                found.add(file.parent.name)
    safe = {"gpt2", "decision_transformer"}  # with eager alone
    safe |= {"clap", "conditional_detr", "detr", "maskformer"}  # a mask of their own
    safe |= {"beit", "esmfold2"}  # what it adds is given to us, who refuse it; no layer
    assert found - safe - {*huggingface_masks.COMPUTE_WITH_MASKS} == set()


def test_a_text_model_that_adds_its_mask_to_scores_of_its_own_is_refused():
    """It saw what follows: pairs are booleans, which hide nothing when they are added."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GitConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vision_config=vision | {"image_size": 8, "patch_size": 4},
    )  # fmt: skip
    model = transformers.GitForCausalLM(config).eval()
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match=f"^layers of git compute with their mask, .*; {SDPA}$"):
        model(torch.tensor([[5, 6, 7]]), use_cache=False)


def test_layers_that_choose_keys_by_their_mask_are_refused():
    """One token without a mask saw nothing: the empty table of ours was widened to a mask that hides all."""
    config = transformers.DeepseekV4Config(
        vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16, sliding_window=6,
        layer_types=["sliding_attention"], moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        q_lora_rank=32, o_lora_rank=16, o_groups=2, index_n_heads=2, index_head_dim=16, index_topk=4,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match=f"^layers of deepseek_v4 compute with their mask, .*; {SDPA}$"):
        model(torch.tensor([[5]]), use_cache=False)


@pytest.mark.parametrize("attention_mask", [None, padding("left")])
def test_layers_that_compute_with_their_mask_are_refused(attention_mask):
    """Doge's took the bounds of ours for a mask of pairs, whose shape did not fit."""
    config = transformers.DogeConfig(**{key: value for key, value in GROUPED.items() if key != "head_dim"})
    model = transformers.DogeForCausalLM(config).eval()
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(
        ValueError, match=f"^layers of doge compute with their mask, of which gpt_triton makes none; {SDPA}$"
    ):
        model(tokens(), attention_mask=attention_mask)


@pytest.mark.parametrize("columns", [1, N - 4, N + 4])
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_a_mask_with_other_columns_than_there_are_keys_is_refused(family, columns, in_pytorch):
    """Without a cache transformers believes the mask, and keys that it lacked were not seen."""
    model, given = build(family, num_hidden_layers=1), torch.ones(3, columns).long()
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(
        ValueError,
        match=f"^attention_mask has {columns} columns and there are {N} keys; give one for each; .*, {SDPA}$",
    ):
        model(tokens(), attention_mask=given, **({"use_cache": False} if family == "Llama" else {}))


def test_positions_of_one_row_serve_batches_of_other_sizes(in_pytorch):
    """The last batch of an evaluation is smaller."""
    q, positions = torch.randn(3, 4, 9, 16), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    attend = partial(huggingface.attention, torch.nn.Identity(), attention_mask=None, position_ids=positions)
    whole, part = attend(q, q, q)[0], attend(q[:2], q[:2], q[:2])[0]
    close(whole[:2], part)


def test_weights_are_refused_where_no_mask_is_asked_for(in_pytorch):
    """SigLIP's layers hear nothing of output_attentions either."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8)
    model = transformers.SiglipVisionModel(config).eval()
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match="output_attentions asks for weights that gpt_triton never has"):
        model(torch.zeros(1, 3, 32, 32), output_attentions=True)
