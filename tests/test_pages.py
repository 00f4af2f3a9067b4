"""The pages, without running their code: plain English, commands that exist, recorded figures."""

from __future__ import annotations

import re
import runpy
import shlex
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from thinwire import evidence, recipes
from thinwire_lab.cli.app import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
PAGES["README"] = ROOT / "README.md"
MEDIAN, NINETIETH, COLUMNS = 18, 35, 120  # words a sentence, and width of a line of prose
PER = re.compile(
    r"\b(bits?|bytes|KB|MB|ms|seconds?|values?|entries|scales?|messages?|words) an? "
    r"(bit|block|bucket|entry|layer|message|node|number|pair|parameter|rank|row|second|step|"
    r"value|worker)\b"
)
HISTORY = re.compile(r"\bused to\b|\buntil (commit|then)\b|\bformerly\b|\bno longer\b|\bgit show\b")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("make", "mkdocs", "mypy", "pip", "pytest", "python", "ruff", "thinwire", "torchrun")
UsageError = typer.BadParameter.__base__  # typer carries a click of its own
WRITTEN = [name for name in PAGES if name != "repository"]  # whose words are those of the files
each_page = pytest.mark.parametrize("name", PAGES)


def prose(text: str) -> list[str]:
    """Paragraphs and items, each on one line: no code blocks, tables, headings or directives."""
    text = FENCE.sub("", text)
    kept: list[str] = [""]
    for line in text.splitlines():
        if re.match(r"\s*([|#!<]|:::|    \S)", line) or not line.strip():
            kept.append("")
        elif re.match(r"\s*([*-]|\d+\.) ", line):
            kept.append(re.sub(r"^\s*([*-]|\d+\.) ", "", line))
        else:
            kept[-1] += f" {line.strip()}"
    return [paragraph.strip() for paragraph in kept if paragraph.strip()]


def sentences(text: str) -> list[int]:
    """How many words each sentence has; code counts as one word."""
    ends = (re.split(r"(?<=[.!?])\s+", _plain(paragraph)) for paragraph in prose(text))
    return [len(one.split()) for some in ends for one in some if re.search(r"\w", one)]


def _plain(paragraph: str) -> str:
    """Code as one word, of links what is read, and no stars."""
    read = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", paragraph))
    return read.replace("*", "")


@each_page
def test_sentences_are_short(name: str) -> None:
    words = sorted(sentences(PAGES[name].read_text()))
    assert statistics.median(words) <= MEDIAN
    assert words[int(0.9 * (len(words) - 1))] <= NINETIETH


@pytest.mark.parametrize("name", WRITTEN)
def test_rates_are_per_and_nothing_is_history(name: str) -> None:
    text = " ".join(PAGES[name].read_text().split())
    for pattern in (PER, HISTORY, COMMIT):
        found = pattern.search(text)
        assert found is None, f"{found[0]!r} in {text[max(0, found.start() - 40) : found.end()]!r}"


@each_page
def test_lines_of_prose_fit_a_screen(name: str) -> None:
    text = FENCE.sub("", PAGES[name].read_text())
    long = [line for line in text.splitlines() if len(line) > COLUMNS and line[:1] != "|"]
    assert not long


def test_how_sentences_are_counted() -> None:
    lines = ["# Head", "", "One two. Three", "four `a b c` five.", "", "| a | b |", "", "```text",
             "no", "```", "* Six [a b](c.md)."]  # fmt: skip
    assert sentences("\n".join(lines)) == [2, 4, 3]


def blocks(text: str, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(text) if language in languages]


@each_page
def test_every_block_says_what_it_is(name: str) -> None:
    languages = {language for language, _ in FENCE.findall(PAGES[name].read_text())}
    assert languages <= {"python", "console", "text"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: of console blocks, and of code inside a line that looks so."""
    for block in blocks(text, "console"):
        yield from (shlex.split(line, comments=True) for line in block.splitlines())
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        bare = re.sub(r"^([A-Z_]+=\S+ )*", "", span)
        if bare.split()[0] in COMMANDS and len(bare.split()) > 1 and "import" not in bare:
            yield shlex.split(span)


@each_page
def test_commands_exist(name: str) -> None:
    for words in commands(PAGES[name].read_text()):
        while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in ("sudo", ".")):
            words = words[1:] if words[0] != "." else []
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    first, *rest = words
    assert first in COMMANDS, f"{first} is no command that a page should show"
    if words[:3] == ["python", "-m", "thinwire_lab"]:
        first, rest = "thinwire", rest[2:]
    if first == "thinwire":
        check_thinwire(rest)
    elif first == "pytest":
        check_pytest(rest)
    elif first == "make":
        assert set(rest) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)), rest
    elif first == "pip":
        check_extras(rest)
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), words[2]
    elif first == "python":
        assert (ROOT / rest[0]).exists(), rest[0]
    elif first == "torchrun" and "-m" in rest:
        assert rest[rest.index("-m") + 1] == "thinwire_lab"
        check_thinwire(rest[rest.index("-m") + 2 :])
    elif first == "torchrun":
        script = rest[-1]
        assert (ROOT / script).exists() or script == "train.py", script


def check_thinwire(arguments: list[str]) -> None:
    """A subcommand; and if there are arguments, ones that it takes."""
    command: Any = typer.main.get_command(app)
    while arguments and hasattr(command, "commands"):
        assert arguments[0] in command.commands, arguments
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if arguments:
        command.make_context("thinwire", list(arguments))


def check_pytest(arguments: list[str]) -> None:
    """Files that exist, and a word for -k that some of their tests have in their names."""
    paths = [ROOT / argument for argument in arguments if argument.startswith("tests")]
    assert all(path.exists() for path in paths), arguments
    if "-k" not in arguments:
        return
    wanted = arguments[arguments.index("-k") + 1].split(" or ")
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    names = re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))
    for word in wanted:
        assert any(word in name for name in names), f"no test of {paths} is about {word}"


def check_extras(arguments: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(known), extras


@pytest.mark.parametrize(
    "words",
    [
        ["thinwire", "guess"],
        ["thinwire", "trace", "--colour", "red"],
        ["pytest", "tests/test_nothing.py"],
        ["pytest", "tests/test_pages.py", "-k", "elephants"],
        ["make", "tea"],
        ["pip", "install", ".[tea]"],
        ["curl", "somewhere"],
    ],
    ids=" ".join,
)
def test_commands_that_do_not_exist_are_found(words: list[str]) -> None:
    with pytest.raises((AssertionError, UsageError)):
        check_command(words)


def test_the_repository_guide_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "repository.py"))
    assert (DOCS / "repository.md").read_text() == script["write_page"](), (
        "run python docs/repository.py"
    )


def test_every_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    on_site = set(re.findall(r": ([\w-]+)\.md", nav))
    assert on_site == {path.stem for path in DOCS.glob("*.md")}


def test_every_recipe_is_in_the_table_and_every_public_name_in_the_reference() -> None:
    import thinwire
    from thinwire import collectives

    table = PAGES["algorithms"].read_text().split("Options of `adtopk`")[0]
    missing = [name for name in recipes.names() if f"`{name}`" not in table]
    assert not missing
    api = PAGES["api"].read_text()
    public = [f"thinwire.{name}" for name in thinwire.__all__ if name != "recipes"]
    public += [f"thinwire.collectives.{name}" for name in collectives.__all__]
    assert not [name for name in public if f"::: {name}\n" not in api]


def rows(text: str, *header: str) -> Iterator[list[str]]:
    """The cells of every table with these first columns."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [_cells(line) for line in table.splitlines()]
        if lines[0][: len(header)] == list(header):
            yield from lines[2:]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_costs_are_those_on_record() -> None:
    text = PAGES["choosing"].read_text()
    found = list(rows(text, "recipe", "training", "optimizer", "saving", "cost", "seeds"))
    assert len(found) > 10
    for call, job, optimizer, saving, cost, seeds in found:
        (trial,) = [
            t
            for t in evidence.find(call.strip("`"))
            if (t.job, t.optimizer) == (job.strip("`"), optimizer)
        ]
        assert trial.recipe == call.strip("`")
        assert (float(cost), int(seeds)) == (trial.cost, trial.seeds), call
        assert abs(float(saving) - trial.saving) <= 0.06, call
    found = list(rows(text, "recipe", "steps of `gpt2`", "saving", "cost"))
    assert len(found) == 3
    for call, steps, saving, cost in found:
        (trial,) = [t for t in evidence.trials() if (t.recipe, t.job) == (call.strip("`"), "gpt2")]
        assert (trial.steps, trial.cost) == (int(steps), float(cost))
        assert abs(float(saving) - trial.saving) <= 0.06


def test_eight_bits_cost_no_accuracy_on_record() -> None:
    """As the first page says."""
    trials = evidence.find("int8()")
    assert len(trials) >= 3
    assert max(trial.cost for trial in trials) <= 0.1


def test_nothing_of_the_site_is_loaded_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    settings = yaml.safe_load(text)
    assert settings["theme"]["font"] is False
    assert {next(iter(p)) if isinstance(p, dict) else p for p in settings["plugins"]} == {
        "search",
        "mkdocstrings",
    }
    assert "://" not in text
