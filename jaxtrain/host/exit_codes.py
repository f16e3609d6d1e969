"""Exit codes of a training process: they tell a launcher whether to start it again.

The scripts of tpu_setup ask this file too, where JAX need not be installed (``python3 -I``):
``exit_codes.py run CODE ...``, ``exit_codes.py restart CODE PROGRESS COUNT LIMIT PAUSE`` and
``exit_codes.py restartable``.

====  ============  ===============================================================  ========
code  name          what has happened                                                restart?
====  ============  ===============================================================  ========
0     DONE          the run is complete, or was stopped on purpose                   no
1                   an error that nobody foresaw; Python's traceback tells           no
2     REFUSED       flags, data or a checkpoint that cannot be; one sentence tells   no
75    PREEMPTED     SIGTERM or SIGINT; the state is saved                            yes
76    HUNG          no step ended for too long; every thread's stack was printed     yes
77    PEER_LOST     another process of the run has died                              yes
78    DIVERGED      too many steps in a row were skipped; the state is saved         no
79    STORAGE       a disk or bucket failed and went on failing; one sentence tells  yes
80    SUPERSEDED    another start of the run has taken over its folder               no
81    ALERTED       an alert with the action stop ended it; the state is saved       no
134   ABORTED       JAX's own C++ ended it with SIGABRT, as it does where process    yes
                    0 has died and it is faster than PEER_LOST to say so
130, 143            SIGINT or SIGTERM ended it at once: it came a second time, or    no
                    before there was anybody to hear it
128+n               another signal killed it, as SIGKILL (137) does where memory     yes
                    runs out and SIGSEGV (139) in a crash: a process is lost
====  ============  ===============================================================  ========

75 is EX_TEMPFAIL of sysexits.h, "the user is invited to retry"; the codes after it stand next to
it so as not to be mistaken for a shell's (126 and above) or a program's own (1, 2). Python's
``subprocess`` gives -n for a process that signal n has ended, shells 128+n.
"""

import random
import sys
from collections.abc import Callable, Sequence

DONE = 0
REFUSED = 2
PREEMPTED = 75
HUNG = 76
PEER_LOST = 77
DIVERGED = 78
STORAGE = 79
SUPERSEDED = 80
ALERTED = 81
ABORTED = 134


class Ended(SystemExit):
    """An end that all processes of a run come to alike; uncaught, it is the exit code."""

    def __init__(self, code: int, message: str):
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message


# After these, the same command with --resume goes on from the last checkpoint.
RESTARTABLE = frozenset({PREEMPTED, HUNG, PEER_LOST, STORAGE, ABORTED})

LONGEST_PAUSE = 300.0
_ASKED_TO_END = frozenset({130, 143})
# A process ends so because another did: what that one ended with says more.
_CONSEQUENCES = frozenset({PEER_LOST, ABORTED})


def restartable(code: int) -> bool:
    """Whether the same command with --resume goes on after this code.

    >>> [restartable(code) for code in (PREEMPTED, 137, REFUSED, 143, DONE)]
    [True, True, False, False, False]
    """
    return code in RESTARTABLE or (128 < code < 160 and code not in _ASKED_TO_END)


def of_run(codes: Sequence[int]) -> int:
    """Returns the one code of a run whose processes ended with these; -n and 128+n both say signal
    n.

    An error that would come again decides before anything that may be restarted, a preemption
    before other interruptions, and the process that was lost before those that ended for it.

    >>> of_run([PEER_LOST, -9, PEER_LOST]), of_run([PEER_LOST, 1]), of_run([0, 0])
    (137, 1, 0)
    """
    codes = [code if code >= 0 else 128 - code for code in codes]
    failed = [code for code in codes if code != DONE]
    order = (
        lambda code: not restartable(code),
        lambda code: code == PREEMPTED,
        lambda code: code not in _CONSEQUENCES,
        lambda code: True,
    )
    return next((code for first in order for code in failed if first(code)), DONE)


def restart(
    code: int,
    progress: bool,
    count: int,
    *,
    limit: int,
    pause: float = 1.0,
    uniform: Callable[[float, float], float] = random.uniform,
) -> tuple[int, float] | None:
    """Decides whether a run is started again, and after what pause.

    The pause doubles with every restart, up to five minutes, and is drawn from its upper half so
    that many runs which lost one file system do not come back at one moment. Returns the new count
    and the seconds to wait; None where it is not started again.

    Args:
      progress: whether it left a newer checkpoint; then the restarts are counted anew. Time alone
        is no progress: a step that always hangs takes half an hour to do so.

    >>> restart(137, False, 3, limit=5, uniform=max)
    (4, 8.0)
    >>> restart(137, False, 5, limit=5) is None, restart(REFUSED, True, 0, limit=5) is None
    (True, True)
    """
    count = 0 if progress else count
    if not restartable(code) or count >= limit:
        return None
    longest = min(LONGEST_PAUSE, pause * 2.0 ** min(count, 60))
    return count + 1, uniform(longest / 2, longest)


def _main(verb: str, *words: str) -> int:
    """Answers the scripts: prints codes, or a count and a pause; returns 1 for no restart."""
    numbers = [int(float(word)) for word in words]
    if verb == "run":
        print(of_run(numbers))
        return 0
    if verb == "restartable":
        print(",".join(map(str, sorted(RESTARTABLE))))
        return 0
    code, progress, count, limit, pause = numbers
    again = restart(code, bool(progress), count, limit=limit, pause=pause)
    if again is not None:
        print(again[0], round(again[1]))
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
