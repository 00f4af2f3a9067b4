"""The file that comparisons append to, and the tables made of it."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from thinwire_lab.cli.app import app
from thinwire_lab.cli.display import lay_out
from thinwire_lab.errors import Refused
from thinwire_lab.report import comparison, style, summary
from thinwire_lab.runs import config, ledger
from thinwire_lab.runs.ledger import Line
from thinwire_lab.runs.loop import Outcome

BOOKS = Path(__file__).parents[3] / "docs" / "results"


def outcome(recipe: str, accuracy: float) -> Outcome:
    metrics = {"bytes_sent": 1e6, "bytes_dense": 2e6, "messages": 20, "steps": 10, "density": 0.5}
    return Outcome(
        recipe=recipe, figures={"accuracy": accuracy}, loss=1.0, first_loss=2.0, steps=10,
        seconds=3.0, step_seconds=0.3, metrics=metrics, finished=True,
    )  # fmt: skip


def line(recipe: str, seed: int, accuracy: float, net: str = "none", **settings: object) -> Line:
    run = config.make_run({"job": "mlp", "recipe": recipe, "data": "a/b/digits",
                       "settings": {"seed": seed, **settings}})  # fmt: skip
    return Line.of(run, 4, net, outcome(recipe, accuracy), Path("nowhere"))


def test_a_table_grows_line_by_line(tmp_path):
    book = tmp_path / ledger.NAME
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        ledger.append(book, line("dense()", seed, accuracy))
    ledger.append(book, line("topk(density={'a|b': 1.0, '': 0.01})", 0, 0.4))
    ledger.append(book, line("dense()", 1, 0.6, net="1gbit"))
    assert "a/b" not in book.read_text().replace("'a|b'", "")  # no paths of this machine
    tables = summary.tables(ledger.read([book]))
    assert list(tables) == [
        "mlp, tiny, digits, 4 workers, loopback", "mlp, tiny, digits, 4 workers, 1gbit"
    ]  # fmt: skip
    head, dense, topk = next(iter(tables.values()))
    assert head[:2] == ["recipe", "accuracy"] and dense[:2] == ["dense()", "60 % ± 14 (2)"]
    shown = summary.markdown([head, dense, topk]).splitlines()
    assert [row.replace("\\|", "").count("|") for row in shown] == [10] * 4


def test_the_best_recipe_comes_first_and_one_that_diverged_last():
    lines = [line("topk()", 0, float("nan")), line("dense()", 0, 0.3), line("int8()", 0, 0.2),
             line("int8()", 1, 0.6)]  # fmt: skip
    ((_, *rows),) = summary.tables(lines).values()
    assert [row[0] for row in rows] == ["int8()", "dense()", "topk()"]
    spoken = [replace(each, outcome=replace(each.outcome, figures={"wer": wer}))
              for each, wer in zip(lines[1:3], (0.8, 0.5), strict=True)]  # fmt: skip
    ((_, *rows),) = summary.tables(spoken).values()
    assert [row[0] for row in rows] == ["int8()", "dense()"]  # less is better


def test_runs_with_other_settings_stand_in_another_table(tmp_path):
    book = tmp_path / ledger.NAME
    for rate in (0.1, 0.2):
        ledger.append(book, line("dense()", 0, rate, rate=rate))
    ledger.append(book, line("topk(density=0.1)", 0, 0.3, rate=0.2))
    tables = summary.tables(ledger.read([book]))
    assert {title.split(", ")[-1]: len(rows) for title, rows in tables.items()} == {
        "rate 0.1": 2, "rate 0.2": 3
    }  # fmt: skip


def test_what_only_shares_a_name_is_another_run(tmp_path):
    book = tmp_path / ledger.NAME
    for folder, words in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / folder / "wiki").mkdir(parents=True)
        (tmp_path / folder / "wiki" / "text").write_text(words)
    made = [("a", None), ("b", None), ("a", tmp_path / "b"), ("c", None), ("gone", None)]
    for data, checkpoint in made:
        values = {"job": "gpt2", "recipe": "dense()", "data": str(tmp_path / data / "wiki")}
        run = config.make_run(values | {"checkpoint": checkpoint and str(checkpoint)})
        ledger.append(book, Line.of(run, 4, "none", outcome("dense()", 0.5), Path("nowhere")))
    lines = ledger.read([book])  # the same text elsewhere is the same run, as is what is gone
    assert len(lines) == 3 and "gpt2 from b, tiny, wiki" in lines[2].place
    assert lines[0].origin and not any(f"/{part}" in book.read_text() for part in "abc")
    assert len(summary.tables(lines)) == 3  # nor are they averaged
    fake = config.make_run({"job": "gpt2", "recipe": "dense()", "data": "fake"})
    assert Line.of(fake, 4, "none", outcome("dense()", 0.5), Path("nowhere")).origin == ""


def test_data_is_told_by_all_that_lies_there(tmp_path):
    folder = tmp_path / "a" / "imagenet"
    for kind in ("cat", "dog"):
        (folder / "train" / kind).mkdir(parents=True)
        (folder / "train" / kind / "0.jpg").write_bytes(bytes(200_000))
    first = ledger.digest(folder)
    shutil.copytree(folder, tmp_path / "b" / "imagenet")
    (tmp_path / "b" / "imagenet" / ".hidden").touch()
    assert ledger.digest(tmp_path / "b" / "imagenet") == first
    other = tmp_path / "c" / "imagenet"
    shutil.copytree(folder, other)
    (other / "train" / "cat" / "0.jpg").write_bytes(bytes(199_999) + b"x")  # at its end
    assert ledger.digest(other) not in ("", first)
    assert ledger.digest(tmp_path / "none") == ""
    gone = config.make_run({"job": "gpt2", "data": "/no/a", "checkpoint": "/no/b"})
    assert Line.of(gone, 4, "none", outcome("dense()", 0.5), Path("nowhere")).origin == ""


def test_settings_that_came_later_had_their_defaults(tmp_path):
    book = tmp_path / ledger.NAME
    ledger.append(book, line("dense()", 0, 0.5))
    values = json.loads(book.read_text())
    del values["settings"]["accumulate"]
    book.write_text(json.dumps(values) + "\n")
    ledger.append(book, line("dense()", 0, 0.6))
    (only,) = ledger.read([book])
    assert only.outcome.figures == {"accuracy": 0.6} and only.settings["accumulate"] == 1


def test_a_line_that_a_killed_process_owes_is_written_once(tmp_path):
    book = tmp_path / ledger.NAME
    for _ in range(2):
        ledger.complete(book, line("dense()", 0, 0.5))
        ledger.complete(book, line("dense()", 1, 0.5))
    assert len(book.read_text().splitlines()) == 2


def test_a_torn_line_does_not_keep_others_from_being_written(tmp_path):
    book = tmp_path / ledger.NAME
    book.write_text('{"job": "ml')
    for _ in range(2):
        ledger.complete(book, line("dense()", 0, 0.5))
    assert len(book.read_text().splitlines()) == 2


def test_a_run_that_diverged_is_in_the_table(tmp_path):
    book = tmp_path / ledger.NAME
    for seed, accuracy in ((0, 0.5), (1, float("nan"))):
        ledger.append(book, line("dense()", seed, accuracy))
    ((_, row),) = summary.tables(ledger.read([book])).values()
    assert row[:2] == ["dense()", "nan % (2)"]


def test_a_run_done_twice_counts_once(tmp_path):
    book = tmp_path / ledger.NAME
    ledger.append(book, line("dense()", 0, 0.5))
    again = line("dense()", 0, 0.5)
    ledger.append(book, replace(again, outcome=outcome("dense()", 0.75)))
    (found,) = ledger.read([book])
    assert found.outcome.figures == {"accuracy": 0.75}


def test_a_line_that_lacks_what_tables_show_is_named(tmp_path):
    book = tmp_path / ledger.NAME
    whole = line("dense()", 0, 0.5)
    bare = replace(whole, outcome=replace(whole.outcome, metrics={"steps": 3, "density": 1.0}))
    ledger.append(book, bare)
    with pytest.raises(Refused, match=r"no result \(its metrics lack bytes_dense, bytes_sent\)"):
        ledger.read([book])
    for damaged in (replace(whole, outcome=replace(whole.outcome, metrics=None)),
                    replace(whole, outcome=replace(whole.outcome, figures=None)),
                    replace(whole, scores=[1])):  # fmt: skip
        book.unlink()
        ledger.append(book, damaged)
        with pytest.raises(Refused, match=r"line 1 of .* is no result"):
            ledger.read([book])


def test_a_torn_line_is_named_and_what_follows_is_whole(tmp_path):
    book = tmp_path / ledger.NAME
    ledger.append(book, line("dense()", 0, 0.5))
    book.write_text(book.read_text() + '{"job": "ml')
    ledger.append(book, line("dense()", 1, 0.5))
    with pytest.raises(Refused, match=r"line 2 of .*results.jsonl is no result"):
        ledger.read([book])
    kept = [text for number, text in enumerate(book.read_text().splitlines()) if number != 1]
    book.write_text("\n".join(kept))
    assert [found.seed for found in ledger.read([book])] == [0, 1]


def test_results_prints_tables_or_one_clear_line(tmp_path):
    book = tmp_path / ledger.NAME
    ledger.append(book, line("dense()", 0, 0.5))
    result = CliRunner().invoke(app, ["results", str(book), "--markdown"])
    assert result.exit_code == 0 and "| `dense()` | 50 % | 1.0000 | 1.00 | 2.0 |" in result.output
    assert "loopback" in CliRunner().invoke(app, ["results", str(book)]).output
    missing = CliRunner().invoke(app, ["results", str(tmp_path / "none.jsonl")])
    assert missing.exit_code == 2 and "cannot read" in missing.output
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    odd = CliRunner().invoke(app, ["results", str(tmp_path / "bytes.jsonl")])
    assert odd.exit_code == 2 and "is no text" in " ".join(odd.output.split())
    (tmp_path / "empty.jsonl").write_text("")
    empty = CliRunner().invoke(app, ["results", str(tmp_path / "empty.jsonl")])
    assert empty.exit_code == 2 and "no result yet" in " ".join(empty.output.split())


def test_brackets_and_dollars_of_recipes_are_shown_as_they_are(tmp_path):
    """Not markup of a terminal, not formulas of a drawing."""
    book, picture = tmp_path / ledger.NAME, tmp_path / "scores.svg"
    odd = "topk(density={'[a-z]$': 1.0, r'b\\.c$': 0.5, '[/x]': 0.1, '': 0.01})"
    score = {"step": 1, "bytes_sent": 1e6, "elapsed": 1.0, "accuracy": 0.5}
    scores = [score, score | {"elapsed": 2.0}]
    ledger.append(book, replace(line(odd, 0, 0.5), scores=scores))
    result = CliRunner().invoke(app, ["results", str(book), "--draw", str(picture)])
    assert result.exit_code == 0 and picture.exists(), result.output
    ((title, rows),) = summary.tables(ledger.read([book])).items()
    terminal = Console(width=200, file=io.StringIO())
    terminal.print(lay_out(rows, f"{title} [a-z]", 200))
    text = terminal.file.getvalue()
    assert odd in text and "loopback [a-z]" in text


def test_long_recipes_leave_room_for_their_figures():
    long = "topk(density=Ramp(start=0.3, end=0.01, steps=700), wire='int8+auto')"
    terminal = Console(width=80, file=io.StringIO())
    both = comparison.table([outcome("dense()", 0.4), outcome(long, 0.5)])
    terminal.print(lay_out(both, None, 80))
    lines = terminal.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", "1", "2", "1", "2"]
    assert "50 %" in lines[2] and lines[4].strip() == f"2  {long}"
    terminal.print(lay_out(both[:2], None, 80))
    assert terminal.file.getvalue().splitlines()[-1].startswith("dense()")


def test_a_table_has_every_figure_of_a_score():
    answers = replace(outcome("topk()", 0.0), figures={"f1": 0.8, "exact_match": 0.7})
    read = replace(outcome("topk()", 0.0), figures={"perplexity": 90.0, "test_loss": 4.5})
    assert [row[:3] for row in comparison.table([answers])] == [
        ["recipe", "f1", "exact_match"], ["topk()", "80 %", "70 %"],
    ]  # fmt: skip
    assert comparison.table([read])[0][:3] == ["recipe", "perplexity", "loss"]


def test_several_jobs_stand_in_one_table():
    spoken = replace(outcome("topk()", 0.0), figures={"wer": 0.7})
    stopped = replace(outcome("topk()", 0.0), figures={})
    jobs = {"mlp": [outcome("dense()", 0.4), outcome("topk()", 0.3)], "lstm-an4": [spoken],
            "bert": [stopped]}  # fmt: skip
    head, *rows = comparison.of_jobs(jobs)
    assert [row[:2] for row in rows] == [
        ["mlp, dense()", "accuracy 40 %"], ["mlp, topk()", "accuracy 30 %"],
        ["lstm-an4, topk()", "wer 70 %"], ["bert, topk()", ""],
    ]  # fmt: skip
    assert head[:3] == ["run", "score", "loss"] and {len(row) for row in rows} == {9}
    assert comparison.of_jobs({"bert": [stopped]}) == comparison.table([stopped])


def test_columns_without_room_stand_below_the_others():
    rows = [["recipe", *(f"figure {n}" for n in range(12))], ["dense()", *["123456.78"] * 12]]
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(lay_out(rows, "a title", 80))
    title, *lines = terminal.file.getvalue().splitlines()
    assert title.strip() == "a title" and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["recipe", "1", "recipe", "1", "1"]
    assert " ".join(lines).count("123456.78") == 12 and "figure 11" in lines[2]


def test_a_recipe_has_one_colour_in_all_drawings_of_a_page():
    scores = [{"step": s, "bytes_sent": 1e6, "elapsed": 1.0 * s, "accuracy": 0.5} for s in (1, 2)]
    lines = [
        replace(line(recipe, 0, 0.5), scores=scores, net=net)
        for net, recipe in (("1gbit", "dense()"), ("1gbit", "topk()"), ("10gbit", "topk()"))
    ]
    colours = [curve.get_color() for axes in summary.drawing(lines).axes for curve in axes.lines]
    assert colours == [style.family(recipe).colour for recipe in ("dense()", "topk()", "topk()")]
    assert len(set(colours)) == 2


def test_when_a_score_was_reached_and_a_drawing_of_the_way(tmp_path):
    log = [{"step": step, "total": 9, "loss": 0.1, "elapsed": 5.0 * step} for step in range(3)]
    log += [{"step": step, "bytes_sent": 1e6 * step, "elapsed": 9.0 * step, "accuracy": value}
            for step, value in ((1, 0.2), (2, 0.5), (3, 0.4))]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    run = config.make_run({"job": "mlp", "recipe": "dense()"})
    made = Line.of(run, 4, "none", outcome("dense()", 0.4), tmp_path)
    assert [score["step"] for score in made.scores] == [1, 2, 3]
    book, picture = tmp_path / ledger.NAME, tmp_path / "scores.png"
    ledger.append(book, made)
    ask = ["results", str(book), "--markdown", "--draw", str(picture), "--reach"]
    result = CliRunner().invoke(app, [*ask, "0.45"])
    head, _, row = result.output.split("\n\n")[1].splitlines()
    assert head.endswith("| s to 45 % | MB to 45 % |") and row.endswith("| 18 | 2.0 |")
    assert picture.read_bytes()[1:4] == b"PNG"
    for name in ("scores", f"{ledger.NAME}/x.png"):
        wrong = CliRunner().invoke(app, [*ask[:4], str(tmp_path / name)])
        assert wrong.exit_code == 2 and "cannot" in wrong.output
    assert not list(tmp_path.glob(".*"))
    assert "| never |" in CliRunner().invoke(app, [*ask, "0.6"]).output
    odd = CliRunner().invoke(app, ["results", str(book), "--draw", str(tmp_path / "a.xyz")])
    assert odd.exit_code == 2 and "cannot draw" in odd.output
    ledger.append(book, line("dense()", 1, 0.5))
    book.write_text(book.read_text().splitlines()[1])
    bare = CliRunner().invoke(app, ["results", str(book), "--draw", str(picture)])
    assert bare.exit_code == 2 and "no scores to draw" in bare.output


def test_a_drawing_of_scores_by_bytes(tmp_path):
    lines = [line("dense()", 0, 0.5), line("dense()", 1, 0.7), line("topk()", 0, 0.4)]
    (axes,) = summary.scatter(lines).axes
    dots = [mark for mark in axes.lines if len(mark.get_xdata()) == 1]
    assert [list(dot.get_ydata()) for dot in dots[1:]] == [[pytest.approx(0.6)], [0.4]]
    assert all(list(dot.get_xdata()) == [2.0] for dot in dots)  # half the bytes of fp32
    assert [note.get_text() for note in axes.texts] == ["dense"]  # topk is beaten: no name
    with pytest.raises(Refused, match=r"dense.. ends with accuracy 60 %, 1 MB"):
        summary.scatter([*lines[:2], line("topk()", 1, float("nan"))])  # it diverged
    book, picture = tmp_path / ledger.NAME, tmp_path / "s.png"
    for one in lines:
        ledger.append(book, one)
    result = CliRunner().invoke(app, ["results", str(book), "--scatter", str(picture)])
    assert result.exit_code == 0 and picture.read_bytes()[1:4] == b"PNG"


def test_one_recipe_is_told_and_not_drawn(tmp_path):
    book, picture = tmp_path / ledger.NAME, tmp_path / "s.png"
    ledger.append(book, line("dense()", 0, 0.5))
    result = CliRunner().invoke(app, ["results", str(book), "--scatter", str(picture)])
    assert result.exit_code == 2 and not picture.exists()
    assert "dense() ends with accuracy 50 %, 1 MB" in " ".join(result.output.split())


def test_the_race_names_the_soonest_and_when_it_was_there(tmp_path):
    picture = tmp_path / "race.png"
    ask = ["results", str(BOOKS / "vgg16.jsonl"), "--net", "100mbit", "--race", str(picture)]
    result = CliRunner().invoke(app, ask)
    assert result.exit_code == 0 and picture.read_bytes()[1:4] == b"PNG"
    assert "100mbit" in result.output and "1gbit" not in result.output
    lines = [one for one in ledger.read([BOOKS / "vgg16.jsonl"]) if one.net == "100mbit"]
    (axes,) = summary.race(lines).axes
    assert sorted(note.get_text() for note in axes.texts) == [
        "PyTorch DDP\n2551 s", "fp16 hook\n1407 s", "gtopk\n723 s"
    ]  # fmt: skip
    assert "59.55 %" in axes.get_xlabel()
    sparse = [one for one in lines if one.outcome.recipe.startswith("gtopk")]
    with pytest.raises(Refused, match="--reach"):
        summary.race(sparse)
    (axes,) = summary.race(sparse, 0.5).axes
    assert len(axes.texts) == 1
    odd = CliRunner().invoke(app, [*ask[:3], "7gbit"])
    assert odd.exit_code == 2 and "no run here" in odd.output


def test_less_is_better_where_a_figure_says_so(tmp_path):
    """Perplexity: the axis is turned, and the race is to a hundredth above dense."""
    lines = [one for one in ledger.read([BOOKS / "language.jsonl"]) if one.job == "lstm-lm"]
    (axes,) = summary.scatter(lines).axes
    bottom, top = axes.get_ylim()
    assert bottom > top and axes.get_ylabel() == "perplexity"
    dense = line("dense()", 0, 0.5)
    there = [{"step": s, "bytes_sent": 1e6, "elapsed": 10.0 * s, "perplexity": p}
             for s, p in ((1, 120.0), (2, 100.9), (3, 100.0))]  # fmt: skip
    ended = replace(dense.outcome, figures={"perplexity": 100.0})
    (axes,) = summary.race([replace(dense, outcome=ended, scores=there)]).axes
    assert [note.get_text() for note in axes.texts] == ["dense\n20 s"]
    assert "101" in axes.get_xlabel()
