"""``python -m experiments.bench ROW``: prints the row as a line of JSON."""

import sys
import typing

import tyro

from experiments.bench import (
    against_torch,
    attention,
    bucket,
    context,
    default_run,
    experts,
    grains,
    pipeline,
    population,
    private,
    recipes,
    serving,
    step,
    throughput,
)

# A row is a function of its flags.
ROWS = {
    "step": step.step,
    "precisions": step.precisions,
    "dispatch": step.dispatch,
    "loader": default_run.loader,
    "bucket": bucket.main,
    "imports": default_run.imports,
    "start": default_run.start,
    "checkpoint": default_run.checkpoint,
    "pipeline": pipeline.main,
    "attention": attention.main,
    "context": context.main,
    "experts": experts.main,
    "grains": grains.main,
    "population": population.main,
    "private": private.main,
    "recipes": recipes.main,
    "serve": serving.main,
    "exact": serving.exact_bits,
    "serve_http": serving.over_http,
    "torch": against_torch.main,
    "throughput": throughput.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ROWS:
        print(f"usage: python -m experiments.bench {{{','.join(ROWS)}}} [--help]", file=sys.stderr)
        raise SystemExit(2)
    row, prog = ROWS[sys.argv[1]], f"python -m experiments.bench {sys.argv[1]}"
    flags = typing.get_type_hints(row)["config"]
    row(tyro.cli(flags, args=sys.argv[2:], prog=prog))
