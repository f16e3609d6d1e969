"""The training of the best member of a population whose members are copied, read from a log."""

import numpy as np

from jaxtrain.run.observe.report import lineage, rates, records
from tests.run.observe.test_report import line, write_run

VARY = "optimizer.learning_rate=log:1e-3:1e-1:3"
# Steps 1 to 20, 21 to 40 and 41 to 50; member 1 copies 2, and then 0 copies that.
PARENTS = {20: [0, 1, 2], 30: [0, 2, 2], 40: [0, 2, 2], 50: [1, 1, 2]}
RATES = {20: [1e-3, 1e-2, 0.1], 30: [1e-3, 0.08, 0.1], 40: [1e-3, 0.08, 0.1], 50: [0.1, 0.08, 0.1]}


def read(path, steps, **config):
    lines = [
        line(step)
        | {"train/members/loss": [1.0, 2.0, np.nan], "train/members/parent": PARENTS[step]}
        | {"train/members/optimizer.learning_rate": RATES[step]}
        for step in steps
    ]
    flags = {"population": {"vary": [VARY], "size": None} | config}
    write_run(path, lines, config={"flags": flags})
    return records.read([path])[0]


def test_the_best_members_training_is_followed_back_to_where_it_began(tmp_path):
    record = read(tmp_path / "run", PARENTS, exploit_every=20)
    assert lineage.found(record) == [
        "The best is member 0, which was trained in steps 1 to 20 as member 2 with learning_rate "
        "0.1; steps 21 to 40 as member 1 with learning_rate 0.08; steps 41 to 50 as member 0 with "
        "learning_rate 0.1."
    ]
    assert rates.found(record) == []  # rates that change are no range test
    assert lineage.found(read(tmp_path / "gap", [20, 50], exploit_every=20)) == []
    assert lineage.found(read(tmp_path / "none", PARENTS, exploit_every=None)) == []
