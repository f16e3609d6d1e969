"""``python -m experiments.bench ROW``: prints the row as a line of JSON."""

import sys

import tyro

from experiments.bench import (
    against_torch,
    attention,
    calls,
    checkpoint,
    compile,
    dispatch,
    imports,
    loader,
    opening,
    pipeline,
    start,
    step,
    throughput,
    watch,
)

# A row is a module with a Config and main(config).
ROWS = {
    "step": step,
    "dispatch": dispatch,
    "calls": calls,
    "loader": loader,
    "opening": opening,
    "imports": imports,
    "start": start,
    "checkpoint": checkpoint,
    "compile": compile,
    "pipeline": pipeline,
    "attention": attention,
    "torch": against_torch,
    "throughput": throughput,
    "watch": watch,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ROWS:
        print(f"usage: python -m experiments.bench {{{','.join(ROWS)}}} [--help]", file=sys.stderr)
        raise SystemExit(2)
    row = ROWS[sys.argv[1]]
    prog = f"python -m experiments.bench {sys.argv[1]}"
    row.main(tyro.cli(row.Config, args=sys.argv[2:], prog=prog))
