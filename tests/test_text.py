"""Text is text: what is typed after prompt= arrives, whatever Hydra's grammar and OmegaConf would read into it. A
sample begins where a word does, its prompt in brackets."""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra._internal.hydra import Hydra
from hypothesis import given
from hypothesis import settings as times
from hypothesis import strategies as st

from conf.program import program
from data.tokenizer import build_tokenizer
from scripts.sample import typed_prompts
from tests.runs import small_run, told
from train import train
from training import evaluate
from training.evaluate import whole_words
from training.hardware import HardwareConfig, set_up
from training.provenance import ROOT


@dataclass
class Echo:
    prompt: str = ""
    name: str | None = None
    files: Any = None
    steps: int = 1
    runs: list[str] = field(default_factory=list)


arrived: list[Echo] = []


@program("tool", Echo, positional="runs")
def main(settings: Echo, run_dir) -> None:
    arrived.append(settings)


def typed(*arguments: str) -> list[Echo]:
    """What `main` gets of a command line."""
    arrived.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["echo.py", *arguments])
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # as in tests/runs.py
        main()
    return arrived


NATURAL = [
    "To be, or not to be",
    "def f(x):",
    "日本",
    "if ",
    " the",
    "it's",
    'She said "no", and left',
    "a\nb\t",
    "x = {1: [2, 3]}",
    "a=b",
    "true",
    "null",
    "1e5",
    "007",
    "\\",
    "C:\\dir\\",
    "${HOME}",
    "f'${x}'",
    "${",
    "a ${x",
    "${}",
    "~!@#$%^&*()",
    "choice(a,b)",
    "",
    "'",
    "don't 'quote' me'",
    "'tis the season, isn't it'",
]


@pytest.mark.parametrize("text", NATURAL)
def test_a_prompt_arrives_as_typed(text):
    (settings,) = typed(f"prompt={text}")
    assert settings.prompt == text


@times(max_examples=25)
@given(st.text(st.sampled_from("ab \\'\"${}[](),:=~\n日") | st.characters(exclude_categories=["Cs"], min_codepoint=1)))
def test_any_text_arrives_as_typed(text):
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    (settings,) = typed(f"prompt={' ' + text if quoted else text}", f"+name=n{text}", "r" + text.replace("=", "-"))
    assert settings.prompt == (" " + text if quoted else text)
    assert settings.name == f"n{text}"
    assert settings.runs == ["r" + text.replace("=", "-")]


@pytest.mark.parametrize("run", ["runs/a=b/12-00", "./a=b", "/tmp/a=b,c=d"])
def test_a_path_may_have_an_equals_sign(run):
    (settings,) = typed(run, "steps=3", "prompt=a/b=c")
    assert (settings.runs, settings.steps, settings.prompt) == ([run], 3, "a/b=c")


def test_a_group_of_hydras_is_no_path():
    (settings,) = typed("a", "hydra/job_logging=disabled")
    assert settings.runs == ["a"]


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("prompt='a, b'", "prompt", "a, b"),  # a shell's quotes, typed twice
        ('prompt="it\'s"', "prompt", "it's"),
        (r"prompt='it\'s'", "prompt", "it's"),
        ('prompt="${steps}"', "prompt", "1"),  # a Hydra user's own
        ("name=null", "name", None),
        ("name='null'", "name", "null"),
        ("files=a (1), b.txt", "files", "a (1), b.txt"),
        ("files=[a.txt,b.txt]", "files", ["a.txt", "b.txt"]),
        ("files=null", "files", None),
        ("runs=[a,'b, c']", "runs", ["a", "b, c"]),
    ],
)
def test_what_is_quoted_already_means_what_it_means_to_hydra(argument, key, value):
    (settings,) = typed(argument)
    assert getattr(settings, key) == value


def test_under_m_a_comma_separates_and_the_rest_is_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = typed("-m", "prompt=def f(x):", "name=a,'b, c'", "steps=1,2", f"hydra.sweep.dir={tmp_path}")
    assert [(run.prompt, run.name, run.steps) for run in runs] == [
        ("def f(x):", name, steps) for name in ("a", "b, c") for steps in (1, 2)
    ]


# ---- samples


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(small_run(folder, "train.steps=2", "train.sample_tokens=8"), folder / "run")
    return folder / "run"


def sampled(trained: Path, monkeypatch, capsys, *arguments: str):
    common = [f"checkpoint={trained}", "max_new_tokens=5", "hardware.device=cpu"]
    return told("scripts.sample", [*common, *arguments], monkeypatch, capsys)


def test_the_lines_of_python_that_are_offered_continue_prompts(trained, capsys):
    page = (ROOT / "training" / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(lines.replace("runs/mine/TIME", str(trained)), {})
    said = capsys.readouterr().out.split("\nThe ")
    assert len(said) == 2
    assert said[0].startswith("if ")


@pytest.mark.parametrize("text", ["To be, or not to be", "def f(x):", "日本", "if "])
def test_a_sample_shows_its_prompt_in_brackets(trained, monkeypatch, capsys, text):
    outcome = sampled(trained, monkeypatch, capsys, f"prompt={text}")
    assert outcome.code == 0, outcome.error
    assert outcome.out.startswith(f"[{text}]")
    assert json.loads(outcome.out.splitlines()[-1])["tokens"] <= 5


def test_each_line_of_a_file_is_continued(trained, monkeypatch, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("To be, or\n\n日本\n the \n", encoding="utf-8")
    several = sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}", "num_samples=2")
    assert several.code == 0, several.error
    for text in ("To be, or", "日本", " the "):
        assert several.out.count(f"[{text}]") == 2
    alone = sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}").out
    assert sampled(trained, monkeypatch, capsys, "prompt=日本").out.splitlines()[0] in alone


def test_a_line_ends_where_a_newline_does(trained, monkeypatch, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\u2028and\x0call\r\ntwo".encode())
    outcome = sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}", "max_new_tokens=1")
    assert outcome.code == 0, outcome.error
    assert outcome.out.startswith("[one\u2028and\x0call]")
    assert "\n[two]" in outcome.out


@pytest.mark.parametrize("end", ["", EOFError])
def test_a_terminal_is_asked_for_prompts(trained, monkeypatch, capsys, end):
    typed = iter(["To be", "日本", end])

    def answer(question: str) -> str:
        line = next(typed)
        if line is EOFError:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    outcome = sampled(trained, monkeypatch, capsys)
    assert outcome.code == 0, outcome.error
    assert outcome.out.startswith("[To be]")
    assert outcome.out.count("[日本]") == 1
    assert next(typed, None) is None
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert "[" not in sampled(trained, monkeypatch, capsys, "seed=3").out.splitlines()[0][:1]  # a document begins


def test_a_character_that_is_unknown_ends_no_session(monkeypatch, capsys):
    typed = iter(["abba", "ab!", "baa", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    assert list(typed_prompts(build_tokenizer("characters", "ab"))) == [["abba"], ["baa"]]
    assert "error: character '!' (U+0021) is not among the 2 characters" in capsys.readouterr().err


def test_the_question_stands_in_no_pipe(trained, monkeypatch, capsys):
    """`scripts.sample | tee file`: it stood before the JSON object, in one line."""
    typed = iter(["To be"])

    def answer(question: str) -> str:
        print(question, end="")
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = sampled(trained, monkeypatch, capsys)
    assert done.out.startswith("[To be]")
    assert json.loads(done.out.splitlines()[-1])["tokens"]
    assert done.error.endswith("> > \n")


def test_a_prompt_that_is_no_utf8_is_refused(trained, monkeypatch, capsys):
    """Its bytes arrive as half a surrogate pair, in whose place tiktoken reads U+FFFD and says nothing."""
    said = "the prompt 'a\\udcffb' is not UTF-8 at character 1; type it as UTF-8"
    refused = sampled(trained, monkeypatch, capsys, "prompt=a\udcffb")
    assert (refused.code, refused.error) == (2, f"error: {said}\n")
    typed = iter(["a\udcffb", "ok", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    assert list(typed_prompts(build_tokenizer("bytes", ""))) == [["ok"]]
    assert said in capsys.readouterr().err


def test_a_prompt_in_utf8_is_read_whatever_the_locale(trained, monkeypatch, capsys):
    """With LC_ALL=C its bytes arrive one by one, as where they are no UTF-8."""
    as_bytes = "é".encode().decode("ascii", "surrogateescape")
    drawing(monkeypatch, [(0, 97)])
    assert sampled(trained, monkeypatch, capsys, f"prompt=caf{as_bytes}").out.startswith("[café]a")
    typed = iter([f"caf{as_bytes}", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    assert list(typed_prompts(build_tokenizer("bytes", ""))) == [["café"]]
    refused = sampled(trained, monkeypatch, capsys, f"prompt={as_bytes}\udcff")
    assert "is not UTF-8 at character 1; type it" in refused.error


def test_without_a_standard_input_a_document_begins(trained, monkeypatch, capsys):
    expected = sampled(trained, monkeypatch, capsys).out.splitlines()[:-1]
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after `<&-`
    done = sampled(trained, monkeypatch, capsys)
    assert (done.code, done.out.splitlines()[:-1]) == (0, expected)


def test_a_prompt_longer_than_the_context_is_said(trained, monkeypatch, capsys):
    said = "the prompt 'To be To be To be To be To be To be To b...' has 240 tokens; the model reads the last 32"
    assert said in sampled(trained, monkeypatch, capsys, f"prompt={'To be ' * 40}").error
    for fits in ("To be", "To be " * 5 + "To"):
        assert "the model reads" not in sampled(trained, monkeypatch, capsys, f"prompt={fits}").error


def test_texts_side_by_side_are_those_of_one_at_a_time(trained, monkeypatch, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("To be\nthe\nif\n", encoding="utf-8")
    texts = [
        sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}", f"batch_size={size}").out
        for size in (1, 64)
    ]
    assert texts[0].splitlines()[:-1] == texts[1].splitlines()[:-1]
    refused = sampled(trained, monkeypatch, capsys, "cache=int8", "prompt=a")
    assert (refused.code, refused.error.count("\n")) == (2, 1)
    assert "cache=int8 needs model.attention=flash, which runs on a GPU; leave it out" in refused.error


def drawing(monkeypatch, *steps: list[tuple[int, int]]) -> list[tuple]:
    """`generate` draws these; what it was called with."""
    calls: list[tuple] = []

    def generate(model, prompts, **options):
        calls.append((prompts, options))
        return iter(steps)

    monkeypatch.setattr("scripts.sample.generate", generate)
    return calls


def test_what_is_typed_is_what_decides_the_draws(trained, monkeypatch, capsys):
    calls = drawing(monkeypatch, [(0, 97)])
    typed = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 4, "num_samples": 2, "batch_size": 7}
    sampled(trained, monkeypatch, capsys, "prompt=a", *(f"{key}={value}" for key, value in typed.items()))
    sampled(trained, monkeypatch, capsys)
    assert calls[0] == ([[97]], typed | {"max_new_tokens": 5, "stop_token": 256, "cache_dtype": None})
    assert calls[1][0] == [[256]]


def test_each_continuation_stands_behind_its_prompt(trained, monkeypatch, capsys, tmp_path):
    """In the prompts' order, whichever ends first; the end of a document is no text."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    drawing(monkeypatch, [(3, 100), (2, 99), (1, 98)], [(3, 256), (2, 256), (1, 256), (0, 97)], [(0, 256)])
    done = sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}", "num_samples=2")
    *texts, last = done.out.splitlines()
    assert texts == ["--- 1", "[one]a", "", "--- 2", "[one]b", "", "--- 1", "[two]c", "", "--- 2", "[two]d", ""]
    assert json.loads(last)["tokens"] == 8


def test_a_stream_waits_for_the_rest_of_a_character(trained, monkeypatch, capsys):
    drawing(monkeypatch, *([(0, token)] for token in (*"é".encode(), *"日".encode()[:2], 256)))
    assert sampled(trained, monkeypatch, capsys, "prompt=a").out.startswith("[a]é\ufffd\n\n{")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"\n \n", [], "has no line with text"),
        (b"\xff", [], "is not UTF-8"),
        (b"a", ["prompt=b"], "give one of them"),
        (None, [], "cannot be used (No such file or directory)"),
    ],
)
def test_prompts_that_cannot_be_used(trained, monkeypatch, capsys, tmp_path, content, arguments, message):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    outcome = sampled(trained, monkeypatch, capsys, f"prompts={tmp_path / 'prompts.txt'}", *arguments)
    assert outcome.code == 2
    assert outcome.error.startswith("error: ")
    assert message in outcome.error


def test_more_than_memory_holds_is_refused(trained, monkeypatch, capsys):
    many = ["num_samples=16777216", "max_new_tokens=16777216"]
    refused = told("scripts.sample", [f"checkpoint={trained}", *many], monkeypatch, capsys)
    assert (refused.code, refused.out) == (2, "")
    said = r"error: num_samples=16777216 of max_new_tokens=16777216 are drawn with .* GiB are free; use fewer"
    assert re.fullmatch(said, refused.error.splitlines()[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rwise, any valid keys in a set of optional arguments", "any valid keys in a set of"),
        ("\n  indented text goes on and on and on", "indented text goes on and on and"),
        ("one-word-only-and-no-blank-in-all-of-it", "one-word-only-and-no-blank-in-al"),
        ("x " + "a" * 30 + "  b c", "a" * 30),  # where the cut falls between two blanks
        ("rt is all", "is"),
        ("é日本語の文章には空白がありません", "日本語の文章には空白"),
    ],
)
def test_a_run_samples_from_whole_words(text, words):
    tokenizer = build_tokenizer("bytes")
    # a split may begin within a character
    tokens = tokenizer.encode_ordinary(text)[1 if text.startswith("é") else 0 :]
    assert tokenizer.decode(whole_words(tokens, 32, tokenizer)) == words


def test_a_run_s_prompt_is_what_was_given_or_the_beginning_of_the_validation_text():
    """Not much of it: the model sees no more than seq_len tokens."""
    tokenizer = build_tokenizer("bytes")
    text = "alf a word, and then more words than thirty-two tokens hold"
    dataset = SimpleNamespace(tokenizer=tokenizer, validation=np.array(tokenizer.encode_ordinary(text), np.uint16))
    found = [tokenizer.decode(evaluate.prompt_of(*ask)) for ask in (("", dataset, 64), ("", dataset, 8))]
    assert found == ["a word, and then more words than", "a word,"]
    assert tokenizer.decode(evaluate.prompt_of("as it is given", dataset, 8)) == "as it is given"


def test_a_sample_of_a_run_is_drawn_by_its_seed(monkeypatch):
    seeds = []
    monkeypatch.setattr(evaluate, "generate", lambda *_, seed, **__: seeds.append(seed) or [[(0, 0xC3)], [(0, 98)]])
    drawn = evaluate.sample(None, [97], 2, 7, build_tokenizer("bytes"), set_up(HardwareConfig(device="cpu")))
    assert drawn == "[a]\N{REPLACEMENT CHARACTER}b", "bytes that are no text end no run"
    assert seeds == [7]
