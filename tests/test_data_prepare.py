"""A text is tokenized once, checked at every opening, and refused in one line when something is wrong with it."""

import errno
import json
import os
import re
import shlex
import shutil
import socket
import threading
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import DataConfig, TokenBatches, build_tokenizer, open_dataset
from data.config import check_tokenizer
from data.dataset import digest, locate
from data.shards import flush
from data.sources import embedded_topics
from data.textfiles import find, inspect, lines, read
from tests.runs import Outcome, told
from tests.test_data_hub import wikitext2_keys

TEXT = "".join(f"line {i} of a text\n" for i in range(200))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No text that lies on this machine may ask the network for anything."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def opened(cache, files, tokenizer="bytes", **options):
    data = DataConfig(source="text", files=files, cache_dir=str(cache), **{"seq_len": 8} | options)
    return open_dataset(data, tokenizer)


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


# --- what comes out


def test_split_is_that_of_nanogpt(corpus, cache):
    """First 90 % and last 10 % of the characters."""
    dataset = opened(cache, str(corpus))
    cut = int(len(TEXT) * 0.9)
    assert dataset.train[:].tolist() == list(TEXT[:cut].encode())
    assert dataset.validation[:].tolist() == list(TEXT[cut:].encode())
    assert dataset.train.dtype == np.uint16
    assert (dataset.vocab_size, dataset.end_of_text) == (257, 256)


def test_counts(tmp_path, cache):
    dataset = opened(
        cache, write_lines(tmp_path / "a.jsonl", ["é one", "two\n", "", "three four", "x" * 10]), seq_len=2
    )
    assert sum(facts["bytes"] for facts in dataset.manifest["splits"].values()) == 6 + 4 + 10 + 10
    train = dataset.manifest["splits"]["train"]
    assert train["documents"] == 4  # the fourth is cut
    assert train["tokens"] == train["bytes"] + 3 == len(dataset.train)


def test_documents_are_separated(tmp_path, cache):
    """A row of JSONL or parquet and a file of text each are a document; nothing is put at the ends."""
    rows = ["first", "second 漢", "third\nwith two lines", "0123456789"]
    expected = "\0".join(rows)[:-5]  # 43 characters, of which the last 10 % are held out
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "text": rows}), tmp_path / "b.parquet")
    names = []
    for number, row in enumerate(rows):
        names.append(str(tmp_path / f"{number}.txt"))
        Path(names[-1]).write_text(row)
    for files in (write_lines(tmp_path / "a.jsonl", rows), str(tmp_path / "b.parquet"), names, str(tmp_path / "?.txt")):
        dataset = opened(cache, files, validation_fraction=0.1, seq_len=1)
        ids = dataset.train[:].tolist()
        assert bytes(0 if i == 256 else i for i in ids).decode() == expected
    assert dataset.manifest["about"]["names"] == ["0.txt", "1.txt", "2.txt", "3.txt"]


def test_another_column(tmp_path, cache):
    """data.text_field names it; a number in a column beside it is nobody's business; a file of text has none."""
    rows = ["first \u2028 line", "second"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n or "none", "body": row}) + "\n" for n, row in enumerate(rows)))
    pq.write_table(pa.table({"body": rows}), tmp_path / "b.parquet")
    (tmp_path / "c.json").write_text(json.dumps([{"body": row} for row in rows], indent=1))
    fingerprints = set()
    for file in (path, tmp_path / "b.parquet", tmp_path / "c.json"):
        dataset = opened(cache, str(file), text_field="body", seq_len=1)
        tokens = [*dataset.train[:].tolist(), *dataset.validation[:].tolist()]
        assert bytes(0 if i == 256 else i for i in tokens).decode() == "\0".join(rows)
        fingerprints.add(dataset.fingerprint)
        wrong = rf'^{file} has no column "text", only (n, )?body; choose one with data\.text_field$'
        with pytest.raises(ValueError, match=wrong):
            opened(cache, str(file))
    assert len(fingerprints) == 3
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(ValueError, match="text_field=body names a column, and text files have none"):
        opened(cache, str(tmp_path / "a.txt"), text_field="body")
    both = opened(cache, [str(path), str(tmp_path / "a.txt")], text_field="body")  # there is a column to name
    assert both.manifest["about"]["names"] == ["a.jsonl", "a.txt"]


def test_a_file_longer_than_a_piece_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("data.textfiles.PIECE_CHARACTERS", 4)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (file,) = inspect([tmp_path / "a.txt"])
    assert list(read(file)) == [("one\ntwo\n", True), ("three\n", False)]


@pytest.mark.parametrize("rows", ['{"text":\r"one"}\r\n{"text": "two"}', '[{"text": "one"}, {"text": "two"}]'])
def test_a_byte_order_mark_before_rows_is_not_read(rows, tmp_path):
    """And nothing is said of it: their caches are those of before it was left out of text."""
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    (file,) = inspect([tmp_path / "a.json"])
    assert list(read(file)) == [("one", True), ("two", True)]
    assert "mark" not in file.identity


def test_a_suffix_in_capitals_is_one(tmp_path, cache):
    """Read as text, rows would be learnt with their braces."""
    (tmp_path / "ROWS.JSONL").write_text('{"text": "hello"}\n{"text": "world"}\n' * 9)
    dataset = opened(cache, str(tmp_path / "ROWS.JSONL"))
    assert dataset.manifest["splits"]["train"]["documents"] == 17
    assert dataset.tokenizer.decode(dataset.train[:11].tolist()) == "hello<|endoftext|>world"


def test_fingerprints_are_those_of_the_first_releases(tmp_path):
    """What was tokenized once is found again, and a run of it resumed."""
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, ["one", "two"])
    (tmp_path / "train.txt").write_text("a\n")
    (tmp_path / "valid.txt").write_text("b\n")
    found = [
        locate(DataConfig(**values), "gpt2")[2].name
        for values in (
            {"source": "text", "files": str(rows)},
            wikitext2_keys(),
            wikitext2_keys(local_dir=str(tmp_path)),
        )
    ]
    assert found == [
        "text-gpt2-8d3d9ae9252bac25",
        "wikitext-2-raw-v1-gpt2-bf4bde9c18dd0901",
        "wikitext-2-raw-v1-gpt2-1cf1b9b54a1415fc",
    ]


def test_files_are_read_alike(tmp_path):
    """Line ends become newlines, all else stays, also where the path looks like a glob."""
    path = tmp_path / "odd [1]*.txt"
    path.write_bytes(" a\r\n\r\n\x0b\x85 b\u2028c\n\n\n d".encode())
    assert list(lines(inspect([path])[0])) == [" a\n", "\n", "\x0b\x85 b\u2028c\n", "\n", "\n", " d"]


def test_a_byte_order_mark_is_no_text(tmp_path, cache):
    """Windows' editors write one; `characters` had a token for it."""
    (tmp_path / "plain.txt").write_text(TEXT)
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    plain, marked = (opened(cache, str(tmp_path / f"{name}.txt"), "characters") for name in ("plain", "marked"))
    assert marked.vocab_size == plain.vocab_size
    assert marked.train[:].tolist() == plain.train[:].tolist()
    assert "\ufeff" not in "".join(lines(inspect([tmp_path / "marked.txt"])[0]))


def test_a_long_text_is_looked_at_a_part_at_a_time(tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"a line of a long text\n" * 2_000_000)
    tracemalloc.start()
    (file,) = inspect([path])
    assert sum(len(text) for text, _ in read(file)) == file.version.bytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < file.version.bytes / 2


def test_characters_come_from_the_training_split(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("abcd" * 50)
    dataset = opened(cache, str(path), "characters")
    assert dataset.tokenizer.alphabet == "abcd"
    assert opened(cache, str(path), "characters").tokenizer.alphabet == "abcd"
    path.write_text("abcd" * 50 + "é")
    with pytest.raises(ValueError, match=r"'é' \(U\+00E9\)"):
        opened(cache, str(path), "characters")
    assert len(list(cache.iterdir())) == 1, "the refused text leaves nothing behind"


def test_embedded(cache, monkeypatch):
    dataset = open_dataset(DataConfig(cache_dir=str(cache), seq_len=8), "bytes")
    topics = embedded_topics()
    other = open_dataset(DataConfig(cache_dir=str(cache), seq_len=8, validation_fraction=0.2), "bytes")
    assert other.fingerprint != dataset.fingerprint
    assert len(other.validation) == pytest.approx(2 * len(dataset.validation), rel=0.02)
    assert (dataset.train[:] == 256).sum() > 50  # topics are documents
    held_out = bytes(i for i in dataset.validation[:].tolist() if i < 256).decode()
    assert "".join(topics).endswith(held_out)
    assert dataset.manifest["about"]["python"]
    assert sum(map(len, topics)) > 300_000
    # nothing of any length that is held out was seen in training
    learnt = set("".join(topics)[: -len(held_out)].split("\n\n"))
    assert not [p for p in held_out.split("\n\n") if p in learnt and len(p) >= 40]
    monkeypatch.setattr("data.sources.embedded_topics", lambda: topics[1:])  # another Python's
    assert digest(locate(DataConfig(cache_dir=str(cache), seq_len=8), "bytes")[1]) != dataset.fingerprint


def test_of_embedded_topics_a_long_paragraph_is_kept_where_it_occurs_first(monkeypatch):
    long = "x" * 40
    topics = {
        "b": f"\nTitle b\n*******\n\n{long}\n\nshort\n\nits own  \nline\n",
        "a": f"Title a\n\n{long}\n \nshort\n",
        "c": f"Title c\n\n{long}\n",
    }
    monkeypatch.setattr("pydoc_data.topics.topics", topics)
    assert embedded_topics() == [f"Title a\n\n{long}\n\nshort\n", "Title b\n*******\n\nshort\n\nits own\nline\n"]


# --- the cache


def test_fingerprint_is_of_content(corpus, tmp_path, cache):
    first = opened(cache, str(corpus))
    moved = tmp_path / "elsewhere" / "other.txt"
    moved.parent.mkdir()
    moved.write_text(TEXT)
    assert opened(cache, str(moved)).fingerprint == first.fingerprint
    others = [opened(cache, str(corpus), "characters"), opened(cache, str(corpus), validation_fraction=0.2)]
    corpus.write_text(TEXT.replace("9", "8", 1))
    os.utime(corpus, ns=(1, 1))
    others.append(opened(cache, str(corpus)))
    others.append(opened(cache, [str(corpus), str(moved)]))
    moved.write_text(TEXT.replace("8", "9", 1))
    others.append(opened(cache, [str(corpus), str(moved)]))
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_second_run_touches_nothing(corpus, cache, monkeypatch):
    first = opened(cache, str(corpus))
    assert first.path.stat().st_mode & 0o777 == 0o755  # a cache may be shared
    before = {path: path.stat() for path in cache.rglob("*")}
    monkeypatch.setattr("data.dataset._prepare", lambda *_: pytest.fail("prepared again"))
    again = opened(cache, str(corpus), num_workers=1)
    assert again.train[:].tolist() == first.train[:].tolist()
    assert again.manifest == first.manifest
    after = {path: path.stat() for path in cache.rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_ino) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_ino) for p, s in after.items()
    }


def test_tokens_do_not_depend_on_threads(corpus, tmp_path):
    one, four = (opened(tmp_path / str(n), str(corpus), num_workers=n) for n in (1, 4))
    assert one.manifest == four.manifest


def truncate(folder):
    os.truncate(folder / "train-00001.bin", 100)
    return "train-00001.bin has 100 bytes in place of 2,048"


def flip_a_byte(folder):
    raw = bytearray((folder / "train-00000.bin").read_bytes())
    raw[1001] ^= 1
    (folder / "train-00000.bin").write_bytes(raw)
    return "train-00000.bin was altered"


def remove_shard(folder):
    (folder / "validation-00000.bin").unlink()
    return "validation-00000.bin is missing"


def remove_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def lose_folder(folder):
    """It was moved to a disk that is not there today."""
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "elsewhere")
    return "manifest.json is missing"


def manifest_of(text):
    def replace_manifest(folder):
        (folder / "manifest.json").write_text(text)
        return "manifest.json is not a manifest"

    return replace_manifest


def make_manifest_a_folder(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    return "manifest.json cannot be read (Is a directory)"


def alter_manifest(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"documents": 1', '"documents": 2', 1))
    return "manifest.json was altered"


def exchange_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"fingerprint": "0" * 64}
    manifest.pop("checksum")
    (folder / "manifest.json").write_text(json.dumps(manifest | {"checksum": digest(manifest)}))
    return "manifest.json belongs to another text"


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_byte,
        remove_shard,
        remove_manifest,
        lose_folder,
        *map(manifest_of, ("{", "[]", "{}", "5")),
        make_manifest_a_folder,
        alter_manifest,
        exchange_manifest,
    ],
)
def test_damage_is_named(damage, corpus, cache, monkeypatch):
    monkeypatch.setattr("data.shards.SHARD_TOKENS", 1024)
    folder = opened(cache, str(corpus)).path
    says = damage(folder)
    with pytest.raises(ValueError, match=r"delete .* and run again") as refused:
        opened(cache, str(corpus))
    assert says in str(refused.value)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("interruption", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), ValueError)],
)
def test_interrupted_preparation_leaves_nothing(interruption, raised, corpus, cache, monkeypatch):
    with monkeypatch.context() as patch:

        def interrupted(*_):
            assert list(cache.glob(".text-*.tmp/train-00000.bin")), "the first split is on disk by now"
            raise interruption

        patch.setattr("data.sources.tail", interrupted)
        with pytest.raises(raised, match=r"^$|data\.cache_dir=.* cannot be written \(No space left on device\)"):
            opened(cache, str(corpus))
    assert not list(cache.iterdir())
    assert len(opened(cache, str(corpus)).train) > 0


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_has_several_errors(number, corpus, cache, monkeypatch):
    monkeypatch.setattr("data.dataset.write_split", lambda *_: (_ for _ in ()).throw(OSError(number, "no more")))
    with pytest.raises(ValueError, match=r"data\.cache_dir=.* cannot be written \(no more\)"):
        opened(cache, str(corpus))


def test_a_folder_that_cannot_get_its_name_is_refused(corpus, cache, monkeypatch):
    def refused(self, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ValueError, match=r"data\.cache_dir=.* cannot be written \(Read-only file system\)"):
        opened(cache, str(corpus))
    assert not list(cache.iterdir())


def test_flushed_files_are_closed(corpus):
    """A long run flushes many."""
    flush(corpus)
    flush(corpus.parent)
    opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert not opened & {os.path.realpath(corpus), os.path.realpath(corpus.parent)}


def test_two_preparations_at_once(corpus, cache, monkeypatch):
    """Both tokenize, one folder wins, both read it."""
    meet = threading.Barrier(2, timeout=30)
    from data import dataset as module

    rename = Path.rename

    def rename_together(self, target):
        meet.wait()
        return rename(self, target)

    monkeypatch.setattr(module.Path, "rename", rename_together)
    results = []
    threads = [threading.Thread(target=lambda: results.append(opened(cache, str(corpus)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0].manifest == results[1].manifest
    assert [path.name for path in cache.iterdir()] == [results[0].path.name]


def test_abandoned_folder_is_removed(corpus, cache):
    folder = opened(cache, str(corpus)).path
    old, young = (cache / f".{folder.name}.{age}.tmp" for age in ("old", "young"))
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    opened(cache, str(corpus))
    assert not old.exists()
    assert young.exists(), "it may belong to a process at work"


def test_an_abandoned_folder_may_be_removed_by_another_start(corpus, cache, monkeypatch):
    """Of a requeued job each process comes along at once."""
    path = locate(DataConfig(source="text", files=str(corpus), cache_dir=str(cache)), "bytes")[2]
    abandoned = cache / f".{path.name}.old.tmp"
    abandoned.mkdir(parents=True)

    def late() -> float:
        abandoned.rmdir()
        return time.time()

    monkeypatch.setattr("data.dataset.time", SimpleNamespace(time=late, perf_counter=time.perf_counter))
    assert opened(cache, str(corpus)).path == path


def test_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"data\.cache_dir=.* cannot be written .*use data\.cache_dir=FOLDER"):
        opened(tmp_path / "cache", str(corpus))


# --- mistakes


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (b"", "a.txt", "a.txt is empty"),
        (b"ok\xff\xfe", "a.txt", "not UTF-8 (byte 2)"),
        ("oké".encode()[:-1], "a.txt", "not UTF-8 (byte 2)"),  # cut
        (b"\x1f\x8b\x08\x00", "a.txt.gz", "not UTF-8 (byte 1); unpack it"),
        (b"x" * (1 << 22) + "é".encode()[:1] + b"z", "a.txt", "not UTF-8 (byte 4,194,304)"),
        (b"x" * ((1 << 22) - 1) + "é".encode()[:1] + b"z", "a.txt", "not UTF-8 (byte 4,194,303)"),  # in two blocks
        (b'{"text": "a"}\n{"text": ', "a.jsonl", "cannot be read as json"),
        (b'{"content": "a"}\n', "a.jsonl", 'no column "text", only content'),
        (b'{"text": "a"}\n{"text": null}\n', "a.jsonl", 'row 2 has no text in its column "text"'),
        (b'{"text": "a"}\n{"n": 1}\n', "a.jsonl", 'row 2 has no text in its column "text" (it is None)'),
        (b'{"text": 3}\n', "a.jsonl", "row 1 has no text"),
        (b'{"text": "a"}\n{"text": "b"}\n{"text": 3}\n', "a.jsonl", 'row 3 has no text in its column "text" (it is 3)'),
        (b'{"text": "a"}\n{"text": {"b": 1}}\n', "a.jsonl", "row 2 has no text"),
        (b'{"text": "a"}\n\n"b"\n', "a.jsonl", "row 2: not an object"),
        (b'{"text": "a"}\n{"text": "b}\n', "a.jsonl", "row 2: "),
        (b'{"text": "a"}\n{"text": "\\ud83d"}\n', "a.jsonl", "row 2: 'utf-8' codec can't encode"),
        (b'{"text": "\\ud83d"}\n', "a.jsonl", "surrogates not allowed; correct or drop it"),
        (b'{"n": ' + b"9" * 5000 + b"}", "a.jsonl", "value has 5000 digits; write one object"),
        (b"{}\n", "a.jsonl", 'has no column "text", nor another; write {"text": "..."}'),
        (b'{"text": ' + b"[" * 100_000, "a.jsonl", "row 1: "),
        (b'[{"text": "a"}, {"text": 3}]', "a.json", "row 2 has no text"),
        (b'\n [{"text": "a"}, {"text": 3}]', "a.json", "row 2 has no text"),  # a list all the same
        (b'[{"text": "a"}, {"text": ', "a.json", "cannot be read as json: Expecting value: line 1 column 26"),
        (
            b'{\n "text": "a"\n}',
            "a.json",
            "double quotes: line 2 column 1 (char 2); write one object a line, or a list of",
        ),
        (b'["a", "b"]', "a.json", "row 1: not an object"),  # an item is no line: it is not parsed again
        (b"PAR1", "a.parquet", "cannot be read as parquet"),
    ],
)
def test_unreadable_file_is_one_line(content, name, says, tmp_path, cache):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        opened(cache, str(tmp_path / name))
    assert str(tmp_path / name) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("files", ["missing.txt", "*.none", ""])
def test_missing_files(files, tmp_path, cache):
    """The last one is a folder."""
    with pytest.raises(ValueError, match=r"data\.files="):
        opened(cache, str(tmp_path / files))


def test_what_no_file_can_be_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.files=.*aaa (cannot be a file|does not exist)"):
        find([f"{tmp_path}/{'a' * 300}"])


def test_a_file_beside_folders_is_not_looked_into(tmp_path):
    (tmp_path / "ab").write_text(TEXT)
    (tmp_path / "ac").mkdir()
    (tmp_path / "ac" / "b.txt").write_text(TEXT)
    assert find([f"{tmp_path}/a*/b*.txt"]) == [tmp_path / "ac" / "b.txt"]


@pytest.mark.parametrize("inside", ["a.txt", "a.jsonl", "a.md", "deeper/a.txt", "no-ending"])
def test_what_is_advised_for_a_folder_finds_its_files(inside, tmp_path):
    folder = tmp_path / "it's [1]"
    (folder / inside).parent.mkdir(parents=True)
    (folder / inside).write_text(TEXT)
    with pytest.raises(ValueError, match="is a folder; use") as refused:
        find([f"{folder}/"])
    (typed,) = shlex.split(str(refused.value).rpartition("use data.files=")[2])
    assert find([typed]) == [folder / inside]


def test_a_pipe_is_no_file(tmp_path, cache):
    """As <(zcat a.txt.gz) gives one: it has no size, and is not empty."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe is a pipe or a device, .*; give a file"):
        opened(cache, str(tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["corpus.txt", "rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("how", ["grown", "gone"])
def test_a_file_that_changes_while_it_is_read_is_refused(name, how, tmp_path, cache, monkeypatch):
    """Its tokens would lie in the cache under the fingerprint of what it was."""
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": TEXT.splitlines()}), path)
    build, contents = build_tokenizer, path.read_bytes()

    def later(name):
        path.unlink()
        if how == "grown":
            path.write_bytes(contents * (1 if path.suffix == ".parquet" else 2))
            os.utime(path, ns=(0, 0))
        return build(name)

    monkeypatch.setattr("data.dataset.build_tokenizer", later)
    with pytest.raises(
        ValueError, match=f"{name} (was changed while it was read; run again|cannot be read)"
    ) as refused:
        opened(cache, str(path))
    assert ("changed" in str(refused.value)) == (how == "grown")
    assert not list(cache.iterdir())


def test_a_file_that_is_gone_once_it_was_read_is_refused(corpus):
    (file,) = inspect([corpus])
    fragments = read(file)
    next(fragments)
    corpus.unlink()
    with pytest.raises(ValueError, match=f"{corpus.name} was changed while it was read"):
        list(fragments)


@pytest.mark.parametrize("how", ["cut", "of one size"])
def test_a_file_that_changes_is_refused_where_its_time_is_kept(how, corpus, cache, monkeypatch):
    """As `cp -p` and `tar x` keep it."""
    build, text, then = build_tokenizer, corpus.read_text(), corpus.stat().st_mtime_ns

    def later(name):
        corpus.write_text(text[: len(text) // 2] if how == "cut" else text[::-1])
        os.utime(corpus, ns=(then, then))
        return build(name)

    monkeypatch.setattr("data.dataset.build_tokenizer", later)
    with pytest.raises(ValueError, match=f"{corpus.name} was changed while it was read; run again"):
        opened(cache, str(corpus))
    assert not list(cache.iterdir())


def test_a_file_is_named_once(corpus, tmp_path, cache):
    """Else the text that is held out at its end is trained on."""
    (tmp_path / "link.txt").symlink_to(corpus)
    (tmp_path / "hard.txt").hardlink_to(corpus)
    for again, name in ((corpus.name, ""), ("corp*.txt", ""), ("link.txt", "link.txt"), ("hard.txt", "hard.txt")):
        both = f"one file twice, as {corpus} and {tmp_path / name}" if name else f"{corpus} twice"
        with pytest.raises(ValueError, match=f"^data.files names {both}; name it once$"):
            opened(cache, [str(corpus), str(tmp_path / again)])


def test_a_copy_of_a_file_is_the_same_text(corpus, tmp_path, cache):
    shutil.copy(corpus, tmp_path / "other.txt")
    says = rf"^data\.files names one text twice, as {corpus} and {tmp_path / 'other.txt'}; name it once$"
    with pytest.raises(ValueError, match=says):
        opened(cache, str(tmp_path / "*.txt"))
    (tmp_path / "other.txt").write_text(TEXT + "more")
    opened(cache, str(tmp_path / "*.txt"))
    for name in ("row.txt", "row.jsonl"):
        write_lines(tmp_path / name, ["one"])
    with pytest.raises(ValueError, match="names one text twice"):
        opened(cache, [str(tmp_path / "row.txt"), str(tmp_path / "row.jsonl")])


def test_seq_len_longer_than_a_split(corpus, cache):
    held_out = len(TEXT) - int(len(TEXT) * 0.9)
    # the latter too long for the other split as well, and for any two
    for asked, otherwise in ((held_out, ", or another data.validation_fraction than 0.1"), (len(TEXT), "")):
        says = rf"data.seq_len={asked} .*validation.*data.seq_len={held_out - 1} or less{otherwise}$"
        with pytest.raises(ValueError, match=says):
            opened(cache, str(corpus), seq_len=asked)
    opened(cache, str(corpus), seq_len=held_out - 1)
    for fraction in (1e-6, 0.9999, 0.9999999):  # the text is long enough
        with pytest.raises(ValueError, match=rf"or another data\.validation_fraction than {fraction}$"):
            opened(cache, str(corpus), validation_fraction=fraction)


def test_shifted_windows_need_two_of_them(corpus, cache):
    options = {"shift_windows": True, "validation_fraction": 0.4}
    longest = (int(len(TEXT) * 0.6) - 1) // 2
    says = rf"data\.seq_len={longest + 1} with data\.shift_windows needs {2 * longest + 3} tokens, the train split has"
    with pytest.raises(ValueError, match=rf"{says} .*; use data\.seq_len={longest} or less"):
        opened(cache, str(corpus), seq_len=longest + 1, **options)
    dataset = opened(cache, str(corpus), seq_len=longest, **options)
    assert TokenBatches(dataset.train, longest, 1, seed=0, shifted=True).windows_per_epoch == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"source": "web"}, "data.source=web"),
        ({"source": "text"}, "data.files"),
        ({"source": "text", "files": [3]}, "data.files=[3]"),
        ({"source": "hub"}, "data.source=hub needs data.name=OWNER/NAME, or data.local_dir=FOLDER"),
        ({"source": "hub", "name": "./mine"}, "data.name=./mine is no dataset of the Hugging Face hub"),
        ({"source": "hub", "name": "a/b/c"}, "data.name=a/b/c is no dataset"),
        ({"source": "hub", "name": "a/b", "documents": "lines"}, "data.documents=lines"),
        (
            {"files": "a.txt"},
            "data.files=['a.txt'] is read only with data.source=text, and data.source=embedded; use data.source=text, "
            "or data.files=null",
        ),
        (
            {"local_dir": "x"},
            "data.local_dir=x is read only with data.source=hub, and data.source=embedded; use data.source=hub, or "
            "data.local_dir=null",
        ),
        ({"text_field": "body"}, "data.text_field=body is read only with data.source=text or data.source=hub"),
        ({"source": "text", "files": "a", "streaming": True}, "data.streaming=True is read only with data.source=hub"),
        ({"cache_dir": ""}, "data.cache_dir='' is empty; use data.cache_dir=~/.cache/flashgpt/data"),
        (
            {"source": "hub", "name": "a/b", "validation_split": "train"},
            "data.validation_split=train has rows that are trained on (data.split=train); hold out others, or leave it "
            "out for the last data.validation_fraction",
        ),
        (
            {"source": "hub", "name": "a/b", "split": "train+test", "validation_split": "test"},
            "data.validation_split=test has rows that are trained on (data.split=train+test); hold out others, or",
        ),
        (
            {"source": "hub", "local_dir": "x", "revision": "main"},
            "data.revision=main is a commit of the hub, and data.local_dir=x is read as it lies; use data.revision=",
        ),
        (
            {"source": "hub", "name": "a/b", "validation_split": "test", "validation_fraction": 0.2},
            "data.validation_fraction=0.2 holds out the end of data.split, and data.validation_split=test is held out",
        ),
        ({"source": "hub", "name": "a/b", "config": ""}, "data.config='' is empty; leave it out"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0"),
        ({"seq_len": 0}, "data.seq_len=0"),
        ({"num_workers": 0}, "data.num_workers=0"),
        ({"num_workers": 10**9}, "data.num_workers=1000000000 must be at most 1024"),
    ],
)
def test_impossible_configuration(values, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("split", "held_out", "overlap"),
    [
        ("train+validation", "validation", True),
        ("train", "train[:10%]", True),
        ("train[:10%]", "train", True),
        ("train[:10%]", "train[:10%]", True),
        ("train[:10%] + test", "validation+test[:5]", True),
        ("all", "validation", True),
        ("train", "all", True),
        ("train[:90%]", "train[90%:]", False),
        ("train[:90%]+test", "train[90%:]+validation", False),
        ("train", "train2", False),
        ("train", "validation", False),
    ],
)
def test_rows_that_are_trained_on_are_not_held_out(split, held_out, overlap):
    """Where it is certain: two slices of a split may be cut side by side."""
    says = re.escape(f"data.validation_split={held_out} has rows")
    with pytest.raises(ValueError, match=says) if overlap else nullcontext():
        DataConfig(source="hub", name="a/b", split=split, validation_split=held_out)


def test_unknown_tokenizer():
    with pytest.raises(ValueError, match="tokenizer= is not known; use one of bytes"):
        check_tokenizer("")
    with pytest.raises(ValueError, match="tokenizer=gpt5 is not known; use one of bytes"):
        build_tokenizer("gpt5")


# --- the program


def test_prepare_and_check(corpus, cache, capsys, monkeypatch):
    def prepare() -> Outcome:
        arguments = ["data=text", f"data.files={corpus}", f"data.cache_dir={cache}", "data.seq_len=4096"]
        return told("scripts.prepare", arguments, monkeypatch, capsys)

    monkeypatch.chdir(cache.parent)
    last = json.loads(prepare().out.splitlines()[-1])
    assert last["splits"]["train"]["tokens"] == int(len(TEXT) * 0.9)
    again = prepare()
    assert again.code == 0
    assert "tokenized" not in again.out
    flip_a_byte(Path(last["path"]))
    refused = prepare()
    assert refused.code == 2
    assert "was altered" in refused.error


def test_a_cache_is_on_disk_before_its_name_is(corpus, cache, monkeypatch):
    """As a checkpoint (test_checkpoint.py): after a power cut it is whole or not there."""
    events, fsync, rename = [], os.fsync, Path.rename
    name = lambda descriptor: Path(f"/proc/self/fd/{descriptor}").readlink().name  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(name(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    opened(cache, str(corpus))
    *files, folder, renamed, above = events
    assert sorted(files) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]
    assert folder.endswith(".tmp")
    assert (renamed, above) == ("rename", cache.name)


def test_files_are_read_in_the_order_in_which_they_are_named(tmp_path, cache):
    """What is held out is the end of the last one."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    dataset = opened(cache, [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    assert dataset.tokenizer.decode(dataset.validation[:].tolist()) == "a" * 20
