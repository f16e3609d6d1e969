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
