"""Any dataset of the hub is read row by row from a folder laid out like it, from the hub's cache, or from the hub."""

import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from omegaconf import OmegaConf

from conf.program import register
from conf.schema import Settings
from data import DataConfig, Dataset, build_tokenizer, hub, open_dataset
from data.dataset import digest, locate
from data.hub import within_reach
from data.textfiles import inspect, lines
from data.wikitext import articles, find

ROOT = Path(__file__).resolve().parents[1]
WIKITEXT = os.environ.get("WIKITEXT_103")  # a folder with WikiText-103's own files
COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.setattr(hub, "within_reach", lambda *_: False)


@pytest.fixture
def folder(tmp_path):
    """Two configurations with a train split of two files and a validation split each, as a repository on the hub."""
    return lay_out(
        tmp_path / "set",
        {
            "en": {"train": [["en one", "en two"], ["", "en three"]], "validation": [["en held out"]]},
            "de": {"train": [["de eins", "de zwei"], ["de drei"]], "validation": [["de zuletzt"]]},
        },
        column="body",
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def lay_out(path: Path, configs: dict[str, dict[str, list[list[str]]]], column: str = "text") -> Path:
    """Parquet files of `configs` (name -> split -> files -> rows), and the card that says which is which."""
    card = "configs:\n"
    for config, splits in configs.items():
        card += f"- config_name: {config}\n  data_files:\n"
        (path / config).mkdir(parents=True)
        for split, files in splits.items():
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
            for i, rows in enumerate(files):
                first = len(split)  # no two splits are the same file
                table = pa.table({"n": range(first, first + len(rows)), column: rows})
                pq.write_table(table, path / config / f"{split}-{i:05d}-of-{len(files):05d}.parquet")
    (path / "README.md").write_text(f"---\n{card}---\n# A dataset\n")
    return path


def opened(cache: Path, **values: object) -> Dataset:
    return open_dataset(DataConfig(**{"source": "hub", "cache_dir": str(cache)} | values | {"seq_len": 1}), "bytes")


def text_of(dataset: Dataset, split: str) -> str:
    """The tokens as text, documents separated by |."""
    return bytes(ord("|") if i == 256 else i for i in dataset.tokens[split][:].tolist()).decode()


def in_the_hubs_cache(folder: Path, name: str, config: str, commits: tuple[str, ...], place: Path, patch) -> None:
    """Put `folder` into the cache of `datasets` at `place`, as if the hub's `name` had been loaded at each commit."""
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
    copy = folder.rename(folder.with_name(name.partition("/")[2]))  # files in the cache begin with the dataset's name
    builder = datasets.load_dataset_builder(str(copy), config, cache_dir=str(place / "made"))
    builder.download_and_prepare()
    for commit in commits:
        shutil.copytree(builder.cache_dir, place / name.replace("/", "___") / config / "0.0.0" / commit)


# --- a folder


def test_a_folder_laid_out_as_on_the_hub(folder, cache, tmp_path):
    """Files in their order, each row a document; the split that is held out is the dataset's own."""
    offline = datasets.config.HF_HUB_OFFLINE  # as the shell has it
    german = {"config": "de", "validation_split": "validation", "text_field": "body"}
    dataset = opened(cache, local_dir=str(folder), **german)
    assert text_of(dataset, "train") == "de eins|de zwei|de drei"
    assert text_of(dataset, "validation") == "de zuletzt"
    assert dataset.path.name.startswith("de-bytes-")
    english = opened(cache, local_dir=str(folder), **german | {"config": "en"})
    assert text_of(english, "train") == "en one|en two|en three", "an empty row is no document"
    swapped = german | {"split": "validation", "validation_split": "train"}
    other = opened(cache, local_dir=str(folder), **swapped)
    assert text_of(other, "train") == "de zuletzt"
    assert list(other.tokens) == ["train", "validation"]
    assert len({dataset.fingerprint, english.fingerprint, other.fingerprint}) == 3

    moved = folder.rename(tmp_path / "elsewhere")
    (moved / ".git").mkdir()
    (moved / ".git" / "HEAD").write_text("ref")
    assert opened(cache, local_dir=str(moved), **german).fingerprint == dataset.fingerprint
    pq.write_table(pa.table({"body": ["anders"]}), moved / "de" / "validation-00000-of-00001.parquet")
    assert opened(cache, local_dir=str(moved), **german).fingerprint != dataset.fingerprint
    assert datasets.config.HF_HUB_OFFLINE is offline


def test_without_a_validation_split_the_end_is_held_out(folder, cache):
    values = {"local_dir": str(folder), "config": "de", "text_field": "body", "split": "train"}
    dataset = opened(cache, **values, validation_fraction=0.5)
    assert (text_of(dataset, "train"), text_of(dataset, "validation")) == ("de eins|de ", "zwei|de drei")
    assert opened(cache, **values, validation_fraction=0.25).fingerprint != dataset.fingerprint


def test_rows_are_read_one_batch_at_a_time(folder, monkeypatch):
    """The second file is junk, and the first one's rows come all the same: nothing reads ahead of what is tokenized."""
    monkeypatch.setattr(hub, "_ROWS", 1)
    next((folder / "de").glob("train-00001*")).write_bytes(b"PAR1 junk PAR1")
    data = DataConfig(source="hub", local_dir=str(folder), config="de", text_field="body")
    rows = hub.open_splits(data, folder, *hub.hash_folder(folder))[0]["train"]()
    assert [next(rows), next(rows)] == ["de eins", "de zwei"]
    with pytest.raises(ValueError, match=r"data\.local_dir=.* cannot be read \(") as refused:
        next(rows)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("held_out", [{}, {"validation_split": "validation"}])
def test_a_file_that_changes_while_the_folder_is_read_is_refused(held_out, folder, cache, monkeypatch):
    """Its tokens would lie in the cache under the fingerprint of what it was."""

    def later(name):
        pq.write_table(pa.table({"body": ["anders", "und mehr"]}), folder / "de" / "train-00001-of-00002.parquet")
        return build_tokenizer(name)

    monkeypatch.setattr("data.dataset.build_tokenizer", later)
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet was changed while it was read; run again"):
        opened(cache, local_dir=str(folder), config="de", text_field="body", **held_out)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("name", ["set/.h/y.jsonl", "real/y.jsonl", "set/linked/y.jsonl"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_file_that_is_not_hashed_is_refused(name, absolute, tmp_path, cache):
    """Else its tokens are those of its first state for good."""
    for part in ("set", "set/.h", "real"):
        (tmp_path / part).mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / name).write_text('{"text": "ab"}\n' * 9)
    path = tmp_path / name if absolute else os.path.relpath(name, "set")
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n")
    says = r"^data\.local_dir=.* reads .*y\.jsonl, which was not hashed .*; put it there under a name without a dot"
    with pytest.raises(ValueError, match=says) as refused:
        opened(cache, local_dir=str(tmp_path / "set"))
    assert "\n" not in str(refused.value)


def test_a_linked_file_is_one_of_the_folder(tmp_path, cache):
    """As all of them are where huggingface_hub keeps a copy; what is behind the link is hashed."""
    (tmp_path / "set").mkdir()
    (tmp_path / ".blob").write_text('{"text": "ab"}\n' * 9)
    (tmp_path / "set" / "train.jsonl").symlink_to(tmp_path / ".blob")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    before = opened(cache, local_dir=str(tmp_path / "link"))
    (tmp_path / ".blob").write_text('{"text": "cd"}\n' * 9)
    assert opened(cache, local_dir=str(tmp_path / "link")).fingerprint != before.fingerprint


def test_what_datasets_keeps_beside_a_saved_dataset_is_refused(tmp_path, cache):
    """It was trained on as well: rows twice, or the numbers of an order."""
    place = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["one", "two", "three"]}).save_to_disk(place)
    before = opened(cache, local_dir=str(place))
    datasets.load_from_disk(place).map(lambda row: {"text": row["text"] + "!"})
    (own,) = place.glob("cache-*.arrow")
    with pytest.raises(ValueError, match=rf"^data\.local_dir={place} reads {own}, .*; delete it, or save the dataset"):
        opened(cache, local_dir=str(place))
    own.unlink()
    assert opened(cache, local_dir=str(place)).fingerprint == before.fingerprint


def test_a_copy_of_a_file_is_refused(tmp_path, cache):
    """What is held out at the end of one would be trained on in the other."""
    (tmp_path / "set").mkdir()
    for name, text in (("one", "ab"), ("other", "cd"), ("third", "ab")):
        (tmp_path / "set" / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n' * 9)
    with pytest.raises(ValueError, match=r"reads one text twice, as .*one\.jsonl and .*third\.jsonl, .*; delete one"):
        opened(cache, local_dir=str(tmp_path / "set"))
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: o*.jsonl\n"
    card += "  - split: everything\n    path: '*.jsonl'\n---\n"
    (tmp_path / "set" / "README.md").write_text(card)  # what is not read may be a copy, and in two splits
    assert opened(cache, local_dir=str(tmp_path / "set"))


def test_a_folder_that_may_not_be_listed_is_named(folder, cache, monkeypatch):
    """`rglob` leaves it out."""
    listed = os.scandir

    def scandir(path):
        if Path(path).name == "de":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    several = [{"source": "text", "files": f"{folder}/{pattern}"} for pattern in ("**", "*/*.jsonl", "d*/*")]
    for values in ({"local_dir": str(folder)}, *several):
        with pytest.raises(
            ValueError, match=rf"^folder {folder}/de cannot be read \(Permission denied\); make it readable, or name"
        ):
            opened(cache, **values)


@pytest.mark.parametrize(("name", "content"), [("README.md", "---\nconfigs:\n- 5\n---\n"), ("a.h5", "no HDF5")])
def test_what_the_library_fails_over_is_one_line(tmp_path, cache, name, content):
    """With a TypeError, with a module that is not installed."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_text(content)
    with pytest.raises(ValueError, match=r"set cannot be read \(.*\); correct the folder, data.config or data.split$"):
        opened(cache, local_dir=str(tmp_path / "set"))


def test_a_file_that_cannot_be_hashed_is_named(folder, cache, monkeypatch):
    """As on a failing disk, or a server that has gone."""

    def file_sha256(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hub, "file_sha256", file_sha256)
    with pytest.raises(ValueError, match=rf"^{folder}/README\.md cannot be read \(Input/output error\); leave it out$"):
        opened(cache, local_dir=str(folder), config="de", text_field="body")


def test_a_folder_of_nothing_is_one_line(tmp_path, cache):
    """`datasets` itself looks for the columns of the first row, and has no words where there is none."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").touch()
    with pytest.raises(ValueError, match=r"data\.local_dir=.* cannot be read \(a file is empty\); correct the folder"):
        opened(cache, local_dir=str(tmp_path / "rows"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"config": "fr"}, "BuilderConfig 'fr' not found. Available: ['en', 'de']"),
        ({}, "Please pick one among the available configs: ['en', 'de']"),
        ({"config": "de", "split": "test"}, "Bad split: test. Available splits: ['train', 'validation']"),
        ({"config": "de"}, 'has no column "text"; choose one of them with data.text_field: n, body'),
        ({"config": "de", "text_field": "n"}, "row 1 of its train split has no text in its column \"n\" (it is 5)"),
        ({"local_dir": "{p}/nowhere"}, "nowhere is not a folder; give a path from"),
        ({"local_dir": "{p}/set/README.md"}, "README.md is not a folder; give a path from"),
        ({"local_dir": "~nosuchuser/set"}, "data.local_dir=~nosuchuser/set names no home"),
        ({"local_dir": "{p}/set/de", "documents": "wikitext", "text_field": "nothing"}, 'has no column "nothing"'),
        ({"local_dir": "{p}/empty"}, "doesn't contain any data files"),
        ({"local_dir": "{p}/mixed"}, "changed from string to number"),
        ({"local_dir": "{p}/lines"}, "has no text in its column \"text\" (it is None); drop it, or choose"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(values, says, folder, cache, tmp_path):
    offline = datasets.config.HF_HUB_OFFLINE  # as the shell has it
    for name, rows in (("empty", []), ("mixed", ["a", 3]), ("lines", ["a", None])):
        (tmp_path / name).mkdir()
        if rows:
            (tmp_path / name / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    values = {key: value.replace("{p}", str(tmp_path)) for key, value in values.items()}
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        opened(cache, **{"local_dir": str(folder)} | values)
    assert "\n" not in str(refused.value)
    assert not cache.exists() or not list(cache.iterdir())
    assert datasets.config.HF_HUB_OFFLINE is offline


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_text_that_is_not_utf8_is_said_to_be_that(name, tmp_path, cache):
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / name
    path.write_bytes({".csv": b"text\ncaf\xe9\n"}.get(path.suffix, b'{"text": "caf\xe9"}\n'))
    if path.suffix == ".parquet":
        column = pa.array([b"caf\xe9"]).view(pa.string())  # which checks nothing
        pq.write_table(pa.table({"text": column}), path)
    says = r"^data\.local_dir=.*/set: its train split is not UTF-8 \(.* 0xe9 .*\); convert it with iconv, or"
    with pytest.raises(ValueError, match=says) as refused:
        opened(cache, local_dir=str(tmp_path / "set"))
    assert "\n" not in str(refused.value)


def test_a_folder_does_not_pass_for_a_dataset_of_the_hub(folder, cache, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ValueError, match=r"data\.name=set is a folder in .*; use data\.local_dir=set"):
        opened(cache, name="set", config="de", text_field="body")
    (folder.parent / "corpus").touch()  # as a file of that name does not
    with pytest.raises(ValueError, match=r"^corpus cannot be had from the Hugging Face hub"):
        opened(cache, name="corpus")


# --- the hub, and its cache


def test_from_the_hubs_cache(folder, cache, tmp_path, monkeypatch):
    """Without a network; what is read is the commit that was asked for, and the fingerprint is that commit's."""
    in_the_hubs_cache(folder, "us/corpus", "de", COMMITS[:1], tmp_path / "hf", monkeypatch)
    german = {"name": "us/corpus", "config": "de", "validation_split": "validation", "text_field": "body"}
    newest = opened(cache, **german)
    assert text_of(newest, "train") == "de eins|de zwei|de drei"
    assert newest.manifest["about"]["commit"] == COMMITS[0]
    pinned = opened(cache, **german, revision=COMMITS[0])
    assert pinned.fingerprint == newest.fingerprint
    with pytest.raises(ValueError, match=f"holds commit {COMMITS[0]} in place of {COMMITS[1]}"):
        opened(cache, **german, revision=COMMITS[1])
    part = opened(cache, **german | {"split": "train[:2]"})
    assert text_of(part, "train") == "de eins|de zwei"
    assert text_of(opened(cache, **german, streaming=True), "train") == "de eins|de zwei|de drei"
    shutil.rmtree(tmp_path / "hf")
    assert opened(cache, **german).fingerprint == newest.fingerprint, "a tokenized copy needs no hub"


def test_each_key_that_chooses_text_is_of_its_fingerprint():
    """Or the tokens of another text would be taken from the cache."""
    asked = {"name": "them/corpus", "config": "de", "revision": "v2", "text_field": "body", "split": "train[:50%]"}
    changes = [{}, {"validation_split": "test"}, {"validation_split": None}, *({key: asked[key]} for key in asked)]
    changes += [{"validation_split": None, "validation_fraction": 0.2}]
    found = set()
    for documents in ("rows", "wikitext"):
        plain = {"source": "hub", "name": "us/corpus", "validation_split": "validation", "documents": documents}
        for change in changes:
            _, identity, path = locate(DataConfig(**plain | change), "bytes")
            found.add(digest(identity))
            assert path.name.startswith(f"{change.get('config', 'corpus')}-bytes-")
    assert len(found) == 2 * len(changes)


def test_slices_that_share_rows_are_refused(folder, cache, tmp_path, monkeypatch):
    in_the_hubs_cache(folder, "us/corpus", "de", COMMITS[:1], tmp_path / "hf", monkeypatch)
    german = {"name": "us/corpus", "config": "de", "text_field": "body"}
    for split, held_out in (
        ("train[:2]", "train[1:]"),
        ("train[:1]", "train[:67%]"),
        ("train[1:]+validation", "train[-1:]"),
    ):
        says = rf"^data\.validation_split={re.escape(held_out)} has rows that are trained on"
        with pytest.raises(ValueError, match=says):
            opened(cache, **german | {"split": split, "validation_split": held_out})
    assert (
        text_of(opened(cache, **german | {"split": "train[:-1]", "validation_split": "train[-1:]"}), "train")
        == "de eins|de zwei"
    )


def test_another_commit_is_another_text(folder, cache, tmp_path, monkeypatch):
    """Two machines that found different commits under one name do not take the texts for the same."""
    in_the_hubs_cache(folder, "us/corpus", "de", COMMITS, tmp_path / "hf", monkeypatch)
    place, found = tmp_path / "hf" / "us___corpus" / "de" / "0.0.0", []
    for commit in COMMITS:
        shutil.move(place / commit, tmp_path / commit)
    for commit in COMMITS:
        shutil.copytree(tmp_path / commit, place / commit)
        found.append(opened(cache / commit, name="us/corpus", config="de", text_field="body").fingerprint)
        shutil.rmtree(place / commit)
    assert len(set(found)) == 2


def test_what_is_asked_of_the_hub(folder, cache, monkeypatch):
    """Name, configuration and revision; nothing is prepared on the disk where data.streaming is on."""
    asked, ask = [], datasets.load_dataset_builder

    def load_dataset_builder(*request, **options):
        asked.append((request, options))
        builder = ask(str(folder), request[1])
        builder.hash = COMMITS[0]
        builder.download_and_prepare = lambda: asked.append("copy")
        builder.as_dataset = builder.as_streaming_dataset
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(hub, "within_reach", lambda *_: True)
    for streaming in (True, False):
        values = {"name": "us/corpus", "config": "en", "revision": COMMITS[0], "text_field": "body"}
        opened(cache / str(streaming), **values, streaming=streaming)
    request = (("us/corpus", "en"), {"revision": COMMITS[0]})
    assert asked == [request, request, "copy"]


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionError("refused"),
        OfflineModeIsEnabled("offline"),
        HTTPError("500"),
        TimeoutError(),
        RuntimeError("x.py"),
    ],
)
def test_hub_out_of_reach_is_one_line(failure, cache, monkeypatch):
    def load_dataset_builder(*request, **options):
        assert datasets.config.HF_HUB_OFFLINE, "no retries when the hub did not answer"
        raise failure

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    remedies = r"us/corpus de cannot be had.*data.local_dir=.*data=text data.files=.*HF_HOME"
    with pytest.raises(ValueError, match=remedies) as refused:
        opened(cache, name="us/corpus", config="de")
    assert "\n" not in str(refused.value)
    assert not datasets.config.HF_HUB_OFFLINE
    assert not list(cache.iterdir())


@pytest.mark.parametrize(("status", "answers"), [(401, True), (404, True), (500, False), (503, False)])
def test_a_hub_that_fails_itself_is_out_of_reach_and_one_that_refuses_is_not(status, answers, monkeypatch):
    class Refused(HfHubHTTPError):
        def __init__(self):
            self.response = SimpleNamespace(status_code=status)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: (_ for _ in ()).throw(Refused()))
    assert within_reach("us/corpus", None) is answers


# --- WikiText


WIKI_LINES = [" \n", " = Ålesund = \n", " \n", " Text @-@ text = \n", " = Not a title = \n", " text . \n", " \n"]
WIKI_LINES += [
    " = Nor this = \n",
    " text . \n",
    " = Nor that = \n",
    " \n",
    " = = Section = = \n",
    " \n",
    " = Next one = \n",
    " \n",
    " last . \n",
    " \n",
]


def wikitext2_keys(**values: object) -> dict:
    """What data=wikitext2 says, and values that are typed beside it."""
    register(Settings)
    chosen = OmegaConf.load(ROOT / "conf/data/wikitext2.yaml")
    cfg = OmegaConf.merge({"data": {"local_dir": None}}, {"data": chosen}, {"data": values})
    return OmegaConf.to_container(cfg, resolve=True)["data"]


def wikitext2(cache: Path, **values: object) -> Dataset:
    return opened(cache, **wikitext2_keys(**values))


def test_articles_begin_at_titles():
    found = list(articles(WIKI_LINES))
    assert [first for _, first in found] == [True, True]
    assert "".join(text for text, _ in found) == "".join(WIKI_LINES)
    assert found[1][0] == " = Next one = \n \n last . \n \n"
    assert list(articles([])) == []


def test_of_wikitexts_own_files_the_first_name_that_exists_is_read(tmp_path):
    for name in ("wiki.train.raw", "train.txt", "validation.txt"):
        (tmp_path / name).touch()
    assert find(tmp_path) == {"train": tmp_path / "train.txt", "validation": tmp_path / "validation.txt"}


@pytest.mark.parametrize("names", [("train.txt", "valid.txt"), ("wiki.train.head.raw", "wiki.valid.raw")])
def test_wikitext_from_its_own_files(names, tmp_path, cache):
    for name in names:
        (tmp_path / name).write_text("".join(WIKI_LINES))
    dataset = wikitext2(cache, local_dir=str(tmp_path))
    assert dataset.manifest["splits"]["train"]["documents"] == 2
    assert list(dataset.tokens) == ["train", "validation"]
    assert dataset.manifest["about"]["names"] == dict(zip(dataset.tokens, names, strict=True))
    rows = DataConfig(source="hub", local_dir=str(tmp_path))
    assert locate(rows, "bytes")[1]["source"] == "hub"  # unless articles are asked for
    for key, value in {
        "split": "train[:1%]", "validation_split": "test", "text_field": "body", "streaming": True,
        "validation_fraction": 0.5,
    }.items():  # fmt: skip
        cut = {"validation_split": None} if key == "validation_fraction" else {}
        with pytest.raises(
            ValueError, match=re.escape(f"data.{key}={value} is not for data.local_dir={tmp_path}, which")
        ):
            wikitext2(cache, local_dir=str(tmp_path), **{key: value}, **cut)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=r"no validation split; add one of valid\.txt"):
        wikitext2(cache, local_dir=str(tmp_path))


def test_wikitext_from_the_hub(cache, tmp_path, monkeypatch):
    """The hub's rows have no blank lines; with these put back the text is that of the files."""
    rows = [line if line.strip() else "" for line in WIKI_LINES]
    splits = {split: [rows] for split in ("train", "validation", "test")}  # as it lies there
    copy = lay_out(tmp_path / "copy", {"wikitext-2-raw-v1": splits})
    expected = re.sub("(?= = Next)", "|", "".join(WIKI_LINES))
    assert text_of(wikitext2(cache, local_dir=str(copy)), "train") == expected
    (revision,) = re.findall("[0-9a-f]{40}", (ROOT / "conf/data/wikitext2.yaml").read_text())
    name = "Salesforce/wikitext"
    in_the_hubs_cache(copy, name, "wikitext-2-raw-v1", COMMITS[:1], tmp_path / "hf", monkeypatch)
    with pytest.raises(ValueError, match=f"holds commit {COMMITS[0]} in place of {revision}"):
        wikitext2(cache)
    config = tmp_path / "hf" / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0"
    (config / COMMITS[0]).rename(config / revision)
    dataset = wikitext2(cache)
    assert [text_of(dataset, split) for split in ("train", "validation")] == [expected] * 2


@pytest.mark.skipif(not WIKITEXT, reason="needs WIKITEXT_103=FOLDER, with WikiText-103's own files")
def test_wikitext_has_its_published_articles():
    for name, count in (("valid", 60), ("test", 60)):
        path = Path(WIKITEXT) / f"wiki.{name}.tokens"
        assert sum(1 for _ in articles(lines(*inspect([path])))) == count


def test_a_file_of_wikitexts_own_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("".join(WIKI_LINES))
    (file,) = inspect([path])
    found = lines(file)
    next(found)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match=r"train\.txt was changed while it was read; run again"):
        list(found)
