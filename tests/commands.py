"""Runs a command of jaxtrain in this process."""

from jaxtrain import cli


def run(capsys, *arguments):
    """Returns its exit status, what it printed, and what it said on standard error."""
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    written = capsys.readouterr()
    return status, written.out, written.err


def refused(capsys, *arguments):
    """Returns the sentence on standard error of a command that is refused, with exit status 2."""
    status, _, err = run(capsys, *arguments)
    assert status == 2, err
    return err
