"""The command line: what it prints, saves and refuses."""

import io
import os
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console

from jaxtrain import cli
from jaxtrain.engines.pipeline import draw
from jaxtrain.engines.pipeline.tables import make_table
from tests.commands import run

ROOT = pathlib.Path(__file__).parents[1]


def picture_of(table, width):
    """The lines of a table's picture without colours."""
    console = Console(file=io.StringIO(), width=width)
    draw.print_tables([table], console=console)
    return console.file.getvalue().splitlines()


def test_picture_is_the_table():
    lines = picture_of(make_table("1f1b", stages=2, microbatches=3), 80)
    assert lines[:5] == [
        "1f1b: 2 stages, 3 microbatches",
        "    tick  0   1   2   3 4",
        "          F F B F B F B B",
        "device 0  0 1   2 0   1 2",
        "device 1    0 0 1 1 2 2",
    ]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_wide_picture_leaves_out_its_middle_and_says_so(width):
    table = make_table("interleaved", stages=4, microbatches=40, virtual=2)
    lines = picture_of(table, width)
    rows = lines[1:7]
    before, after = (part.split() for part in rows[0].split(draw.GAP))
    assert all(len(line) <= width for line in lines)
    assert all(draw.GAP in row for row in rows)
    first, last = int(before[-1]) + 1, int(after[0]) - 1
    assert before[1:] == [str(t) for t in range(first)]
    assert after == [str(t) for t in range(last + 1, table.ticks)]
    note = f", ticks {first} to {last} of {table.ticks} left out"
    assert lines[0] == (draw.title(table) + note)[:width]


def test_a_picture_that_fits_is_whole():
    lines = picture_of(make_table("gpipe", stages=2, microbatches=4), 200)
    assert draw.GAP not in "".join(lines)
    assert "left out" not in "".join(lines)
    assert lines[1].split() == ["tick", *map(str, range(10))]


def test_schedule_compares_all_schedules(capsys):
    status, out, _ = run(capsys, "schedule", "--stages", "8", "--microbatches", "32")
    assert status == 0
    words = [line.split() for line in out.splitlines()]
    assert ["gpipe", "1", "78", "117", "17.9%", *["32"] * 8] in words
    assert ["1f1b", "1", "46", "117", "17.9%", *map(str, range(15, 0, -2))] in words
    assert ["interleaved", "2", "86", "106.5", "9.9%", *map(str, range(23, 8, -2))] in words


def test_schedule_shows_one_with_its_flags(capsys):
    flags = "--stages 4 --microbatches 8 --schedule interleaved --virtual 3 --backward 3"
    status, out, _ = run(capsys, "schedule", *flags.split())
    assert status == 0
    assert "gpipe" not in out
    assert ["interleaved", "3", "38", "36", "11.1%"] in [x.split()[:5] for x in out.splitlines()]


def test_schedule_weighs_the_stages_of_a_model(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    flags = "--stages 4 --microbatches 8 --schedule 1f1b --model gpt2-124m"
    status, out, _ = run(capsys, "schedule", *flags.split())
    assert status == 0
    even, balanced = (
        next(line.split() for line in out.splitlines() if f"{name}:" in line)
        for name in ("even", "balanced")
    )
    assert (even[2:6], balanced[2:6]) == (["3"] * 4, ["4", "4", "4", "0"])
    assert (even[10:14], balanced[10:13]) == (["52", "52", "52", "100"], ["100"] * 3)
    assert float(balanced[-2].replace(",", "")) < 0.8 * float(even[-2].replace(",", ""))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--stages 2 --microbatches 4 --model gpt3", "--model is 'gpt3': use one of"),
        ("--stages 0 --microbatches 4", "error: stages is 0: a pipeline needs at least 1\n"),
        ("--stages 2 --microbatches 4 --backward 0", "error: --backward is 0.0: a time"),
        ("--stages 2 --microbatches 4 --schedule gpipe --virtual 2", "virtual is 2: use virtual=1"),
        ("--stages 2 --microbatches 4 --png /no/such/folder/x.png", "error: "),
    ],
)
def test_what_cannot_be_is_one_sentence_and_status_2(capsys, flags, sentence):
    status, out, err = run(capsys, "schedule", *flags.split())
    assert status == 2
    assert not out
    assert sentence in err
    assert err.count("\n") == 1


def test_arguments_that_the_library_speaks_of_are_flags_here(capsys):
    flags = ["--target", "cpu:8", "--steps-per-call", "0", "--tokenizer", "257"]
    status, _, err = run(capsys, "plan", "experiments.gpt", *flags)
    assert (status, err) == (2, "error: --steps-per-call is 0: give at least 1\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("plan tests.small --target cpu:8 --serch", "did you mean --search?"),
        ("parity tests.small --tolerence=1", "did you mean --tolerance?"),
        ("compare tests.small --vry steps=1", "did you mean --vary?"),
        ("plan tests.small --target cpu:8 --stepz 1", "--steps INT"),  # as tyro says it
    ],
)
def test_a_misspelt_option_of_a_command_with_an_experiment_is_named(capsys, typed, meant):
    status, out, err = run(capsys, *typed.split())
    assert (status, out) == (2, "")
    assert meant in err


@pytest.mark.parametrize("command", ["evaluate", "predict", "generate", "serve"])
@pytest.mark.parametrize("typed", ["--run A --model B", "--model=B --run=A"])
def test_two_names_of_one_flag_are_refused(capsys, command, typed):
    wanted = "error: --model and --run are names of one flag: give one of them\n"
    assert run(capsys, command, *typed.split()) == (2, "", wanted)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["schedule", "--stages", "2", "--mic"]])
def test_what_cannot_be_read_is_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2


def test_png_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plot\]'"):
        draw.save_png([make_table("1f1b", stages=2, microbatches=2)], tmp_path / "x.png")


def test_png_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedules.png"
    flags = ["--stages", "3", "--microbatches", "6", "--png", str(path)]
    assert run(capsys, "schedule", *flags)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_draws_every_unit_at_its_time():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    table = make_table("interleaved", stages=2, microbatches=4, virtual=2)
    ax = Figure().subplots()
    draw.draw(table, ax, forward=1.0, backward=2.0, end=20.0, inches=1.0)
    idle, *boxes = ax.patches
    assert idle.get_width() == 13.5
    assert len(boxes) == len(ax.texts) == 2 * 4 * 2 * 2
    last = max(boxes, key=lambda box: box.get_x())
    assert last.get_x() + last.get_width() == 13.5


def test_module_and_current_folder(tmp_path):
    """``python -m jaxtrain`` is the command, and modules in the current folder can be imported."""
    # As the installed script starts: without the current folder.
    code = "import sys; sys.path.remove(''); from jaxtrain.cli import main\n"
    code += "main(['schedule', '--stages', '1', '--microbatches', '1']); import mine"
    (tmp_path / "mine.py").write_text("print('found')")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert imported.stdout.endswith("found\n"), imported.stderr
    command = [sys.executable, "-m", "jaxtrain", "schedule", "--stages", "0", "--microbatches", "1"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
