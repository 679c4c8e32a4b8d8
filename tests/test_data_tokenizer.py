"""Text to ids and back without loss; pieces and threads give the tokens of one long call."""

import json
import re
import sys

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import DataConfig, build_tokenizer, open_dataset, tokenizer_from_state, tokenizer_state
from data.tokenize import PIECE_CHARACTERS, Counts, head, pieces, tail, tokenize
from data.tokenizer import END_OF_TEXT
from data.tokenizer_file import FileEncoding, read_tokenizer
from data.tokenizer_json import tokenizer_json
from training.evaluate import whole_words

# many line ends, blanks and apostrophes, where GPT-2's pattern is touchy
SNIPPETS = ["\n", "\n\n\n", "  ", "\t", "\r", "a", "'s", " 1", ".", "é", "–", "\u2003", "\u3000", "\x1c", "\x85"]
SNIPPETS += ["漢", "😀"]
PROSE = st.lists(st.sampled_from(SNIPPETS), max_size=60).map("".join)


@given(st.text())
def test_bytes_round_trip(text):
    encoding = build_tokenizer("bytes")
    assert encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.decode(encoding.encode_ordinary(text)) == text


@given(st.text(min_size=1))
def test_characters_round_trip(text):
    encoding = build_tokenizer("characters", "".join(sorted(set(text))))
    ids = encoding.encode_ordinary(text)
    assert len(ids) == len(text)
    assert encoding.decode(ids) == text
    assert encoding.n_vocab == len(set(text)) + 1
    assert encoding.eot_token == len(set(text))


@given(PROSE)
def test_gpt2_round_trip(gpt2, text):
    assert gpt2.decode(gpt2.encode_ordinary(text)) == text


def test_vocabularies_end_in_end_of_text():
    assert build_tokenizer("bytes").eot_token == 256
    assert build_tokenizer("bytes").n_vocab == 257


def test_what_looks_like_end_of_text_is_text():
    assert 256 not in np.concatenate(list(tokenize([("a<|endoftext|>b", True)], build_tokenizer("bytes"), 1, Counts())))


def test_a_document_that_began_before_the_split_ends_as_others_do():
    counts = Counts()
    found = np.concatenate(list(tokenize([("a", False), ("é", True)], build_tokenizer("bytes"), 1, counts)))
    assert found.tolist() == [97, 256, *"é".encode()]
    assert counts == Counts(tokens=4, bytes=3, documents=2)


def test_invalid_utf8_can_be_decoded():
    encoding = build_tokenizer("bytes")
    half = list("é".encode())[:1]
    assert encoding.decode(half) == "\ufffd"
    assert encoding.decode_bytes(half) == "é".encode()[:1]


def test_unknown_character_is_named():
    encoding = build_tokenizer("characters", "abc")
    for encode in (encoding.encode_ordinary, encoding.encode_to_numpy):
        with pytest.raises(ValueError, match=r"'é' \(U\+00E9\).*tokenizer=bytes"):
            encode("abé")
    with pytest.raises(ValueError, match="'<'"):
        encoding.encode_to_numpy("a<|endoftext|>", disallowed_special=())
    assert encoding.encode("a<|endoftext|>", allowed_special="all") == [0, 3]


@pytest.mark.parametrize("encoding", [build_tokenizer("bytes"), build_tokenizer("characters", "\n abcé")])
def test_stored_tokenizer_is_the_same(encoding):
    stored = json.loads(json.dumps(tokenizer_state(encoding)))
    again = tokenizer_from_state(stored)
    assert again.encode_ordinary("a bé\n") == encoding.encode_ordinary("a bé\n")
    assert (again.n_vocab, again.eot_token, again.name) == (encoding.n_vocab, encoding.eot_token, encoding.name)


def test_a_tokenizer_json_neither_cuts_nor_pads_nor_begins_a_text():
    """Those of many models are saved with such settings: whatever came after the first 512 tokens would be lost."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
    ours = build_tokenizer("bytes")
    inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))
    inner.enable_truncation(4)
    inner.enable_padding(length=6)
    inner.post_processor = tokenizers.processors.TemplateProcessing("x $0", special_tokens=[("x", 256)])
    theirs = FileEncoding("theirs", json.dumps({"end_of_text": END_OF_TEXT, "tokenizer": json.loads(inner.to_str())}))
    for text in ("ab", "abcdefgh", END_OF_TEXT):
        assert theirs.encode_ordinary(text) == ours.encode_ordinary(text)
    assert (theirs.n_vocab, theirs.eot_token) == (257, 256)


def test_a_tokenizer_json_without_newlines_takes_a_long_text():
    """In its middle a newline was encoded, to see what comes before it."""
    pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
    ours = build_tokenizer("characters", " ab")
    contents = {"end_of_text": END_OF_TEXT, "tokenizer": tokenizer_json(ours)}
    theirs, text = FileEncoding("theirs", json.dumps(contents)), "ab " * (2 * PIECE_CHARACTERS)
    for encoding in (ours, theirs):
        cut = list(tokenize([(text, True)], encoding, 1, Counts()))
        assert len(cut) > 1
        assert np.concatenate(cut).tolist() == ours.encode_ordinary(text)


@pytest.fixture
def words(tmp_path):
    """The folder of a tokenizer whose vocabulary, and not a special token, has the end of text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "<unk>": 1, "a": 2, "b": 3}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return tmp_path


@pytest.mark.parametrize(
    ("config", "reason"), [(None, "tokenizer_config.json is not there"), ("{}", "eos_token is None"), ("[]", "list")]
)
def test_a_tokenizer_json_alone_wants_an_end_of_text(config, reason, words):
    """The library tokenizers saves no other file."""
    file = words / "tokenizer_config.json"
    file.unlink()
    if config:
        file.write_text(config)
    with pytest.raises(ValueError, match=re.escape(f'{{"eos_token": "TOKEN"}} in {file}, or use one of ours')) as found:
        read_tokenizer(str(words))
    assert reason in str(found.value)
    file.write_text('{"eos_token": "</s>"}')
    assert FileEncoding(str(words), read_tokenizer(str(words))).eot_token == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a b a b </s> a\n" * 9, "reads '</s>' in the text as the end of a document; take it out of the text, or use"),
        ("a b c\n" * 9, r"has no token for much of the text: 8 of 24 stand for text that is lost; use another"),
    ],
)
def test_a_text_of_whose_words_some_are_lost_or_end_it_is_refused(words, text, said, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    with pytest.raises(ValueError, match=f"tokenizer=.* {said}"):
        open_dataset(data, str(words))


def test_a_word_that_the_text_calls_unknown_is_not_lost(words, tmp_path):
    """As WikiText-2 does."""
    (tmp_path / "a.txt").write_text("a b <unk>\n" * 99)
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    assert open_dataset(data, str(words)).manifest["splits"]["train"]["unknown"] == 0


def test_a_text_without_a_character_to_train_on_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n")
    keys = {"cache_dir": str(tmp_path / "cache"), "seq_len": 1, "validation_fraction": 0.9999}
    with pytest.raises(ValueError, match=r"training split is empty; .* smaller data\.validation_fraction"):
        open_dataset(DataConfig(source="text", files=str(tmp_path / "a.txt"), **keys), "characters")


def test_a_character_of_held_out_text_alone_is_refused_by_its_name(tmp_path):
    """GPT-2's remedy, which is of runs of blanks, stood around it."""
    (tmp_path / "a.txt").write_text("ab" * 99 + "!")
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    with pytest.raises(ValueError, match=r"^character '!' .* 2 characters of the training split; .*tokenizer=bytes$"):
        open_dataset(data, "characters")


def test_held_out_text_may_be_unknown(words, tmp_path):
    """Only what is trained on decides whether a tokenizer suits."""
    (tmp_path / "a.txt").write_text("a b\n" * 90 + "c c\n" * 10)
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    assert open_dataset(data, str(words)).manifest["splits"]["validation"]["unknown"] > 0


def test_a_lossy_text_is_refused_before_all_of_it_is_read(words, tmp_path, monkeypatch):
    monkeypatch.setattr("data.dataset.LOOKED_AT", 10)
    (tmp_path / "a.txt").write_text((99 * "c" + "\n") * (3 * PIECE_CHARACTERS // 100))
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    with pytest.raises(ValueError, match=r"has no token for much of the text: .* of 2,62\d stand"):
        open_dataset(data, str(words))


def test_a_few_unknown_words_are_counted(words, tmp_path):
    (tmp_path / "a.txt").write_text("a b\n" * 150 + "c\n" + "a b\n" * 50)
    data = DataConfig(source="text", files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), seq_len=2)
    said = []
    open_dataset(data, str(words), report=said.append)
    assert said[0].endswith("MB/s), 1 tokens unknown")
    assert said[1].endswith("MB/s)")


def test_tokens_of_sentencepiece_are_streamed_with_their_blanks_and_bytes(tmp_path):
    """A tokenizer of words with blanks before them, and of bytes for what it has no word for, as Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    model = tokenizers.models.BPE(
        {word: id for id, word in enumerate(words)}, [("▁", "a"), ("a", "b"), ("▁a", "b")], byte_fallback=True
    )
    inner, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    blanks = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    inner.normalizer = tokenizers.normalizers.Sequence(blanks)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    encoding = build_tokenizer(str(tmp_path))
    text = "ab a\n\nab 漢 b"
    tokens = encoding.encode_ordinary(text)
    assert b"".join(encoding.decode_bytes([token]) for token in tokens) == b" " + text.encode()
    assert encoding.decode(tokens) == " " + text
    assert encoding.decode_bytes([encoding.eot_token]) == b"</s>"
    whole = "ab a\nb " * (PIECE_CHARACTERS // 4) + "\nab"  # read in pieces, with the tokens of one call
    cut = list(tokenize([(whole, True), ("\na", True)], encoding, 2, Counts()))
    assert len(cut) == 4
    one_call = [*encoding.encode_ordinary(whole), encoding.eot_token, *encoding.encode_ordinary("\na")]
    assert np.array_equal(np.concatenate(cut), one_call)
    assert encoding.decode(whole_words(tokens, 3, encoding)) == " a"


def test_what_a_tokenizer_fails_over_is_one_line(monkeypatch):
    """GPT-2's pattern over a million blanks in a row."""
    encoding = build_tokenizer("bytes")

    def fails(text, **asked):
        raise ValueError("Max stack size exceeded for backtracking")

    monkeypatch.setattr(encoding, "encode_to_numpy", fails)
    with pytest.raises(ValueError, match=r"^tokenizer=bytes fails over .*backtracking\); break up its longest runs of"):
        list(tokenize([("a", True)], encoding, 1, Counts()))


def test_gpt2_out_of_reach_is_one_line(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ValueError, match=r"TIKTOKEN_CACHE_DIR.*tokenizer=bytes") as refused:
        build_tokenizer("gpt2")
    assert "\n" not in str(refused.value)


@given(st.lists(st.tuples(PROSE.filter(bool), st.booleans()), max_size=6), st.integers(2, 40))
@example([("a" * 9, True), ("aaa\na\na", True)], 2)  # the first has no cut, which says nothing of the second
def test_pieces_keep_text_and_documents(fragments, size):
    def documents(stream):
        joined: list[str] = []
        for text, first in stream:
            joined = [*joined, text] if first or not joined else [*joined[:-1], joined[-1] + text]
        return joined

    cut = list(pieces(fragments, size))
    assert documents(cut) == documents(fragments)
    # a piece ends at the first safe cut past the size, or where its document ends
    assert not any(re.search(r"\n[!-~]", text[size - 1 :]) for text, _ in cut)


@given(PROSE, st.integers(2, 40))
@example("a\n\n\nb", 3)  # GPT-2 has a token for two newlines, but the last of three stands alone
@settings(max_examples=300)
def test_pieces_change_no_token(gpt2, text, size):
    ids = [token for part, _ in pieces([(text, True)], size) for token in gpt2.encode_ordinary(part)]
    assert ids == gpt2.encode_ordinary(text)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """A small tokenizer that cuts text as Llama 3's, whose pattern puts newlines to a full stop before them."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made, folder = tokenizers.Tokenizer(models.BPE()), tmp_path_factory.mktemp("llama3")
    words = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"])
    made.train_from_iterator(["a line of it.\nanother line,\nand the end.\n\nmore of it!\n"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return build_tokenizer(str(folder))


@given(PROSE, st.integers(2, 40))
@example("a line of it.\nanother line\nof it.\nmore", 3)
@settings(max_examples=100)
def test_pieces_change_no_token_of_another_pattern(llama3, text, size):
    cut = pieces([(text, True)], size, llama3.divides)
    assert [token for part, _ in cut for token in llama3.encode_ordinary(part)] == llama3.encode_ordinary(text)


def test_another_pattern_than_gpt2s_is_asked_about_each_cut(llama3, monkeypatch):
    text = "a line of it.\nanother line\nof it.\n" * 20
    monkeypatch.setattr("data.tokenize.pieces", lambda fragments, **asked: pieces(fragments, 50, **asked))
    found = np.concatenate(list(tokenize(iter([(text, True)]), llama3, 1, Counts())))
    assert found.tolist() == llama3.encode_ordinary(text)


def test_a_run_of_newlines_longer_than_is_looked_at_is_not_cut():
    """A tokenizer that joins two of them pairs them from the first on, which it did not see."""

    def pairs(text: str) -> list[str]:
        return re.findall(r"\n\n|[\s\S]", text)

    def divides(left: str, right: str) -> bool:
        return pairs(left + right) == pairs(left) + pairs(right)

    for number in range(60, 70):
        text = "a" * (100 - number) + "\n" * number + "b\n" * 50
        cut = [piece for piece, _ in pieces([(text, True)], 98, divides)]
        assert len(cut) > 1
        assert [pair for piece in cut for pair in pairs(piece)] == pairs(text)


def test_a_text_without_lines_that_begin_in_ascii_is_cut_too():
    line = "\u3000\u3000天地玄黃，宇宙洪荒。\n"
    cut = [text for text, _ in pieces([(line * 50, True), (line * 50, False)], 40)]
    assert "".join(cut) == line * 100
    assert max(map(len, cut)) < 4 * 40


@given(st.lists(st.tuples(PROSE.filter(bool), st.booleans()), max_size=6), st.integers(0, 400))
def test_head_and_tail_divide_a_stream(fragments, cut):
    whole = "".join(text for text, _ in fragments)
    first, rest = list(head(fragments, cut)), list(tail(fragments, cut))
    assert "".join(text for text, _ in first) == whole[:cut]
    assert "".join(text for text, _ in rest) == whole[cut:]


def test_parallel_is_serial(monkeypatch):
    monkeypatch.setattr("data.tokenize.pieces", lambda fragments: pieces(fragments, 50))
    encoding = build_tokenizer("bytes")
    documents = [f"document {i}\n" + "a line of it\n" * i for i in range(60)]
    expected = []
    for document in documents:
        expected += [*([encoding.eot_token] if expected else []), *document.encode()]
    for workers in (1, 4):
        counts = Counts()
        stream = ((document, True) for document in documents)
        assert np.concatenate(list(tokenize(stream, encoding, workers, counts))).tolist() == expected
        text = "".join(documents)
        assert counts == Counts(len(expected), len(text), 60)


def test_the_blank_before_a_word_is_kept_token_by_token(tmp_path):
    """Of a tokenizer as Llama's, whose decoder drops that of the first word."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "▁the": 1, "▁fox": 2}))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    encoding = build_tokenizer(str(tmp_path))
    tokens = encoding.encode_ordinary("the fox")
    assert [encoding.decode_bytes([token]) for token in tokens] == [b" the", b" fox"]
    assert encoding.decode(tokens) == " the fox"


def test_a_folder_without_the_package_that_reads_it_is_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not installed
    with pytest.raises(ValueError, match=r"tokenizer=theirs needs the package tokenizers; uv run --group hf brings it"):
        FileEncoding("theirs", "{}")
