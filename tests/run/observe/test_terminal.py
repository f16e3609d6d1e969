"""What a person sees, on a terminal and in a log file."""

import io
import re
import time

import jax
import pytest
from rich.console import Console

from jaxtrain.run.observe import terminal
from jaxtrain.run.observe.terminal import Progress, print_header, print_lines


def plain() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False)


def tty() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def shown(console: Console) -> str:
    """What is left of the output once control codes and times of day are removed."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", text, flags=re.M)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_come_first_last_and_at_an_interval():
    clock, console = Clock(), plain()
    with Progress(100, console=console, clock=clock) as progress:
        clock.now = 60.0  # the first step waits for more than itself
        for step in range(1, 101):
            progress.update(step, {"loss": 1 / step}, items_per_second=12_345.0)
            clock.now += 1.0
    lines = shown(console).splitlines()
    steps = [int(re.match(r"step (\d+)/100  loss", line).group(1)) for line in lines]
    # First, then whenever LINE_SECONDS have passed at one step a second, then last.
    assert steps == [1, *range(1 + 15, 100, 15), 100]
    assert lines[0] == "step 1/100  loss 1.0000  12.3 k tokens/s"
    assert lines[1] == "step 16/100  loss 0.0625  12.3 k tokens/s  1:24 left"
    assert lines[-1] == "step 100/100  loss 0.0100  12.3 k tokens/s"


def test_a_long_step_is_no_silence(monkeypatch):
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 0.1)
    console = plain()
    with Progress(100, console=console) as progress:
        progress.update(7, {"loss": 1.0}, items_per_second=None)
        until = time.monotonic() + 20
        while shown(console).count("no news") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    lines = console.file.getvalue().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    assert shown(console).splitlines()[1] == "step 7/100  no news for 0:00"
    said = console.file.getvalue()
    time.sleep(0.3)
    assert console.file.getvalue() == said


def test_a_resumed_run_counts_on_from_its_step():
    clock, console = Clock(), plain()
    with Progress(1000, start=900, item="images", console=console, clock=clock) as progress:
        progress.update(901, {"loss": 2.0}, None)
        clock.now = 30.0
        progress.update(911, {"loss": 2.0, "sampler_gap": 0.0}, 8.0)
    assert shown(console).splitlines() == [
        "step 901/1000  loss 2.0000",
        "step 911/1000  loss 2.0000  sampler gap 0  8 images/s  4:27 left",  # 89 steps at 3 s
    ]


def test_a_terminal_has_one_line_that_is_redrawn():
    console = tty()
    with Progress(5, console=console) as progress:
        for step in range(1, 6):
            progress.update(step, {"loss": 3.25}, 1000.0)
        progress.note("evaluating [1/2]")
    output = shown(console)
    last = output.splitlines()[-1]
    assert "5/5" in last
    assert "loss 3.2500  1 k tokens/s" in last
    assert "evaluating [1/2]\n" in output.replace("\r", "")
    assert output.count("\n") <= 3  # not a line per step


def test_a_loss_that_is_not_finite_is_shown():
    console = plain()
    with Progress(2, console=console) as progress:
        progress.update(1, {"loss": float("nan")}, None)
    assert shown(console) == "step 1/2  loss nan\n"


def test_the_header_shows_texts_as_they_are():
    console = plain()
    facts = {"mesh": "[data=2, tensor=4]", "dtype[s]": "[bold]bf16[/bold]", "parameters": "124 M"}
    print_header("run [a]", facts, console=console)
    lines = [line.rstrip() for line in shown(console).splitlines()]
    assert lines == [
        "run [a]",
        "mesh        [data=2, tensor=4]",
        "dtype[s]    [bold]bf16[/bold]",
        "parameters  124 M",
        "",
    ]


def test_lines_are_printed_as_they_are():
    console = plain()
    print_lines(["[x] " + "long " * 40, "end"], console=console)
    assert shown(console) == "[x] " + "long " * 40 + "\nend\n"


@pytest.mark.parametrize("make", [plain, tty])
def test_other_processes_print_nothing(monkeypatch, make):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    console = make()
    print_header("title", {"a": "b"}, console=console)
    print_lines(["a"], console=console)
    with Progress(2, console=console) as progress:
        progress.update(1, {"loss": 1.0}, 1.0)
        progress.note("note")
    assert console.file.getvalue() == ""


def test_output_goes_to_standard_output_by_default(capsys):
    print_lines(["here"])
    assert capsys.readouterr().out == "here\n"


def test_a_long_wait_says_how_long_and_how_much_is_left(monkeypatch):
    for console in (plain(), tty()):
        with terminal.waiting("compiling", expected=90.0, console=console, every=0.02):
            until = time.monotonic() + 20
            while "left" not in shown(console) and time.monotonic() < until:
                time.sleep(0.01)
        assert re.search(r"compiling for 0:0\d, about 1:[23]\d left", shown(console))


def test_a_notebook_gets_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    print_header("a run", {"mesh": "data 8"})
    assert capsys.readouterr().out == "a run\nmesh  data 8\n\n"


def test_a_silence_says_how_much_is_left(monkeypatch):
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 0.1)
    clock, console = Clock(), plain()
    with Progress(100, console=console, clock=clock) as progress:
        for step in (1, 2, 3):
            progress.update(step, {"loss": 1.0}, items_per_second=None)
            clock.now += 2.0
        until = time.monotonic() + 20
        while "no news" not in shown(console) and time.monotonic() < until:
            time.sleep(0.01)
    assert re.search(r"step 3/100  no news for 0:0\d  3:14 left", shown(console))
