"""With what a training process ends, so that whoever started it knows whether to start it again.

====  ============  ===============================================================  ========
code  name          what has happened                                                restart?
====  ============  ===============================================================  ========
0     DONE          the run is complete                                              no
1                   an error that nobody foresaw; Python's traceback tells           no
2     REFUSED       flags, data or a checkpoint that cannot be; one sentence tells   no
75    PREEMPTED     SIGTERM or SIGINT; the state is saved                            yes
76    HUNG          no step ended for too long; every thread's stack was printed     yes
77    PEER_LOST     another process of the run has died                              yes
78    DIVERGED      too many steps in a row were skipped; the state is saved         no
79    STORAGE       a disk or bucket failed and went on failing; one sentence tells  yes
80    SUPERSEDED    another start of the run has taken over its folder               no
134   ABORTED       JAX's own C++ ended it with SIGABRT, as it does where process    yes
                    0 has died and it is faster than PEER_LOST to say so
128+n               signal n ended it at once: SIGTERM (143) and SIGINT (130) when   no
                    they come a second time, or before training has begun
====  ============  ===============================================================  ========

75 is EX_TEMPFAIL of sysexits.h, "the user is invited to retry"; the codes after it stand next to
it so as not to be mistaken for a shell's (126 and above) or a program's own (1, 2). Python's
``subprocess`` gives -n for a process that signal n has ended, shells 128+n.
"""

DONE = 0
REFUSED = 2
PREEMPTED = 75
HUNG = 76
PEER_LOST = 77
DIVERGED = 78
STORAGE = 79
SUPERSEDED = 80
ABORTED = 134

# After these, the same command with --resume goes on from the last checkpoint.
RESTARTABLE = frozenset({PREEMPTED, HUNG, PEER_LOST, STORAGE, ABORTED})
