"""``python -m experiments.planted``: prints which planted bugs are named to the line."""

import sys
from collections.abc import Sequence

from experiments.planted import BUGS, look
from jaxtrain.host.simulated import simulate_devices


def main(names: Sequence[str]) -> int:
    """Prints the table; 1 where a step that is right was said to differ."""
    simulate_devices(8)
    rows = []
    for name in names or BUGS:
        rows.append(row := look(name, right=True))
        verdict = "named" if row.named else "found" if row.difference else "MISSED"
        note = f" ({BUGS[name].note})" if BUGS[name].note else ""
        print(f"{verdict:6} {name}{note}: on {row.mesh} the step {row.difference}", flush=True)
        if row.alarm is not None:
            print(f"       FALSE ALARM: the right step {row.alarm}", flush=True)
    found, named = sum(r.difference is not None for r in rows), sum(r.named for r in rows)
    alarms = sum(r.alarm is not None for r in rows)
    print(f"{len(rows)} bugs: {found} found, {named} named to the line")
    print(f"{len(rows)} right forms of them: {alarms} false alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
