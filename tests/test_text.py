"""Text is text: what is typed after prompt= arrives, whatever Hydra's grammar and OmegaConf would read into it."""

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hypothesis import given
from hypothesis import settings as times
from hypothesis import strategies as st

from conf.program import program


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


@times(max_examples=25, deadline=None)
@given(st.text(st.sampled_from("ab \\'\"${}[](),:=~\n日") | st.characters(exclude_categories=["Cs"], min_codepoint=1)))
def test_any_text_arrives_as_typed(text):
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    (settings,) = typed(f"prompt={' ' + text if quoted else text}", f"+name=n{text}", "r" + text.replace("=", "-"))
    assert settings.prompt == (" " + text if quoted else text)
    assert settings.name == f"n{text}"
    assert settings.runs == ["r" + text.replace("=", "-")]


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
