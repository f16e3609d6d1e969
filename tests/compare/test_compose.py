"""The composition table: its entries, its outcomes, and a real cell from flags to page."""

import dataclasses
import importlib
import pathlib
import typing

import jax
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare import compose, composition
from jaxtrain.compare.capabilities import BASES, capabilities, together
from jaxtrain.layout import Layout
from jaxtrain.run.options import OptimizerOptions
from tests import commands

# Parts of the slow network that the data axis stands for.
UNTRIED = {"mesh.dcn_fsdp", "mesh.dcn_pipe"}
# Of the optimizer: numbers that another entry needs, and shapes of the learning rate in time.
NUMBERS = {"learning_rate", "schedule", "warmup_steps", "weight_decay", "batch_scaling"}
NUMBERS |= {"plateau_patience", "plateau_window", "watch_bins"}


def of(*names):
    known = {each.name: each for each in capabilities()}
    return together([known[name] for name in names])


def test_every_switch_of_a_layout_and_every_flag_of_the_optimizer_has_an_entry():
    entries = [together([each]) for each in capabilities()]
    asked = {name for each in entries for name in each.fields}
    fields = {path.removeprefix("mesh.") for path in Layout().values().keys() - UNTRIED}
    assert not fields - asked
    given = {flag for each in entries for flag in each.flags}
    (chain,) = OptimizerOptions.__bases__
    flags = {f"--optimizer.{x.name.replace('_', '-')}" for x in dataclasses.fields(chain)}
    assert not {x for x in flags if x[12:].replace("-", "_") not in NUMBERS} - given


@pytest.mark.parametrize("module", BASES)
def test_no_flag_of_an_experiment_hides_one_that_all_have(module):
    own = typing.get_type_hints(importlib.import_module(module).Config)
    every = typing.get_type_hints(jt.Config)
    assert {name: own[name] for name in every} == every


def test_alternatives_are_no_pair_and_meshes_are_joined():
    assert of("lamb", "lion") is None
    assert of("ZeRO 1", "ZeRO 2") is None
    assert of("encoder", "z-loss") is None  # flags of different experiments
    assert of("ZeRO 1", "tensor parallel").layout == "data=2,zero=1,tensor=2"
    both = of("lamb", "dropout")
    assert both.layout == "data=2,fsdp=2,tensor=2"
    assert "--optimizer.name lamb" in both.command
    assert "--dropout 0.2" in both.command


def test_parts_are_disjoint_and_all_together_are_all_pairs():
    cells = compose.pairs(capabilities())
    parts = [compose.part_of(cells, i, 16) for i in range(16)]
    assert sorted(id(x) for part in parts for x in part) == sorted(map(id, cells))
    assert max(map(len, parts)) < 1.3 * min(map(len, parts))
    readme = (pathlib.Path(__file__).parents[2] / "jaxtrain/README.md").read_text()
    assert f"all {len(cells):,} pairs of {len(capabilities())} capabilities" in readme


def test_the_readme_has_the_table_of_the_results_that_are_kept():
    """Run ``jaxtrain compose --missing --out tests/compare``, and put composition.md there."""
    here = pathlib.Path(__file__).parent
    kept = composition.read(here)
    table = composition.markdown(kept, capabilities())
    assert table in (here.parents[1] / "jaxtrain/README.md").read_text()
    in_another_order = dict(reversed(kept.items()))
    assert composition.markdown(in_another_order, capabilities()) == table
    assert not [names for names, result in kept.items() if result.outcome == "fault"]


@pytest.mark.parametrize(
    ("found", "outcome", "text"),
    [
        ({"loss": (0.0, ""), "gradients": (2e-7, "w")}, "equal", "2.0e-07 in the gradients of w"),
        ({"gradients": (0.5, "w")}, "fault", "5.0e-01 in the gradients of w"),
        (ValueError("`zero` is 1 with mesh.fsdp 2: no"), "refused", "`zero` is 1"),
        (ValueError("`zero` is 1: no"), "fault", "does not name both: `zero` is 1: no"),
        (KeyError("w"), "fault", "KeyError in "),
    ],
)
def test_a_cell_says_what_came_of_it(found, outcome, text, monkeypatch):
    def run_layout(program, reference):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(compose.parity, "compile_on", lambda *given, **options: None)
    monkeypatch.setattr(compose.parity, "run_one_device", lambda *given: [])
    monkeypatch.setattr(compose.parity, "run_layout", run_layout)
    (cell,) = compose.compose([of("fsdp", "ZeRO 1")])
    assert (cell.outcome, text in cell.text) == (outcome, True), cell
    if outcome == "fault" and not isinstance(found, Exception):
        monkeypatch.setattr(compose.parity, "rounding_of", lambda *given: {"gradients": 0.3})
        (cell,) = compose.compose([of("fsdp", "bf16")])
        assert (cell.outcome, "itself makes 3.0e-01" in cell.text) == ("equal", True)
        monkeypatch.setattr(compose.parity, "rounding_of", lambda *given: {"gradients": 0.2})
        assert [each.outcome for each in compose.compose([of("fsdp", "bf16")])] == ["fault"]
    (cell,) = compose.compose([of("attention by cuDNN", "lamb")])
    assert (cell.outcome, cell.text) == ("needs", "a GPU")


def test_the_second_batch_of_a_growing_store_has_text_that_was_appended():
    cell = of("growing store", "fsdp")
    assert "--data STORE " in cell.command
    marks = compose._experiment([cell]).data.watermarks
    assert [marks.at(step).parts for step in range(3)] == [0, 1, 1]
    assert of("growing store", "mixture, two held-out sets") is None  # it is of one store
    (refused,) = compose.compose([of("growing store", "private training")])
    assert (refused.outcome, "--grow-every is 1" in refused.text) == ("refused", True), refused


@pytest.mark.slow
def test_an_optimizer_that_meshes_change_is_found_beside_one_that_they_do_not():
    def by_devices(updates, state, params=None):
        return jax.tree.map(lambda g: -g * jax.sharding.get_abstract_mesh().size, updates), state

    sgd, lion = cells = of("fsdp", "sgd"), of("fsdp", "lion")
    right = compose._experiment([sgd])
    wrong = right.with_(optimizer=optax.GradientTransformation(lambda _: (), by_devices))
    layout = Layout.parse("fsdp=2", right.layout)
    assert [cell.beside[1::2] for cell in cells] == [("sgd",), ("lion",)]
    both = [compose.Laid(sgd, right, layout), compose.Laid(lion, wrong, layout)]
    left = []

    def trial():
        left.extend((yield from compose._side_by_side(both)))

    assert [cell.names for cell in trial()] == [("fsdp", "sgd")]
    assert left == both[1:]


def test_the_command_runs_a_pair_and_writes_the_table_and_the_page(tmp_path, capsys):
    both = ["--only", "tensor parallel", "--only", "frozen leaves"]
    (tmp_path / composition.RESULTS).write_text(
        "fsdp x ZeRO 1\trefused\tno\t2026-11-01\ta1\ntelepathy x lamb\tequal\t0\t2026-11-01\ta1\n"
    )
    status, out, err = commands.run(capsys, "compose", *both, "--out", str(tmp_path))
    assert (status, "1 of 1" in err, "2 pairs, 1 equal, 1 refused." in out) == (0, True, True), err
    assert (
        "Refused:\n\n- **ZeRO 1** with fsdp\n" in out
    )  # as it was kept; telepathy is none any more
    kept = composition.read(tmp_path)
    # As it was kept; telepathy is no capability any more.
    assert kept.keys() == {("fsdp", "ZeRO 1"), ("tensor parallel", "frozen leaves")}
    assert kept["tensor parallel", "frozen leaves"].commit
    assert (tmp_path / composition.TABLE).read_text() == out
    page = (tmp_path / composition.PAGE).read_text()
    assert 'class="equal" title="tensor parallel x frozen leaves: equal, ' in page
    assert "\njaxtrain parity experiments.gpt --steps 4 " in page
    status, again, err = commands.run(capsys, "compose", *both, "--missing", "--out", str(tmp_path))
    assert (status, again, err) == (0, out, "")  # nothing is missing
    status, _, err = commands.run(capsys, "compose", "--only", "telepathy")
    assert (status, "--only is 'telepathy', which is no capability" in err) == (2, True)
