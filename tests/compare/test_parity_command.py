"""``jaxtrain parity``: it passes what is right, and names what is wrong where something is."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import cli
from jaxtrain.compare import parity
from jaxtrain.models import decoder
from jaxtrain.run.main import load_experiment
from jaxtrain.sharding import collectives
from jaxtrain.sharding.rules import Rules
from tests import commands

# A user's experiment: two branches stacked into one parameter, a running mean as model state, Adam
# with its own tiny epsilon, and a bias that no gradient reaches but for rounding. Each fault makes
# the mathematics depend on the mesh in another place.
EXPERIMENT = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np, optax
import contextlib
from jax.sharding import PartitionSpec as P
import jaxtrain as jt


@dataclasses.dataclass(frozen=True)
class Config:
    fault: str = "none"
    rows: int = 16
    tensor: int = 1
    dcn_data: int = 1
    zero: int = 0


def init(rng):
    one, two = jax.random.split(rng)
    params = {"branches": {"up": 0.3 * jax.random.normal(one, (2, 8, 16)),
                           "down": 0.3 * jax.random.normal(two, (2, 16, 8))},
              "shift": jnp.zeros(8)}
    return params, {"mean": jnp.zeros(8)}


@jax.custom_vjp
def by_hand(up_DH, down_HD, x_ND):
    return over_tensor(local, P())(up_DH, down_HD, x_ND)


def local(up_DH, down_HD, x_ND):
    return jax.lax.psum(jnp.tanh(x_ND @ up_DH) @ down_HD, "tensor")


def pull(up_DH, down_HD, x_ND, y_ND):
    # Differentiated inside the map, psum becomes psum of what is whole on every device already.
    return jax.vjp(local, up_DH, down_HD, x_ND)[1](y_ND)


def over_tensor(function, out):
    specs = (P(None, "tensor"), P("tensor", None), P())
    inputs, out = (specs, out) if out == P() else ((*specs, P()), specs)
    return jax.shard_map(function, in_specs=inputs, out_specs=out, axis_names={"tensor"},
                         check_vma=False)


by_hand.defvjp(
    lambda *inputs: (by_hand(*inputs), inputs),
    lambda inputs, y_ND: over_tensor(pull, None)(*inputs, y_ND))


def build(config):
    def size(of):
        return jax.sharding.get_abstract_mesh().size if config.fault == of else 1

    def loss_fn(params, model_state, batch, rng):
        x_ND, (up, down) = batch["x"], (params["branches"][n] for n in ("up", "down"))
        second = by_hand if config.fault == "psum" else lambda u, d, x: jnp.tanh(x @ u) @ d
        y_ND = jnp.tanh(x_ND @ up[0]) @ down[0] + second(up[1], down[1], x_ND) + params["shift"]
        # softmax does not see what is added to all of a row
        y_ND = jax.nn.log_softmax(y_ND + params["shift"].sum())
        mean = 0.9 * model_state["mean"] + 0.1 * y_ND.mean(0) * size("state")
        total = -(y_ND * batch["y"]).sum() * (1 + 1e-3 * (size("loss") - 1))
        return jt.WeightedLoss(total, jnp.float32(len(x_ND))), {"mean": mean}

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g * size("optimizer"), grads), state

    def stream(start, sharding):
        def batches(step):
            r = np.random.default_rng(step)
            while True:
                yield {"x": r.normal(size=(config.rows, 8)).astype("f"),
                       "y": r.random((config.rows, 8)).astype("f")}
        return contextlib.nullcontext(batches(start))

    row = jax.ShapeDtypeStruct((config.rows, 8), jnp.float32)
    return jt.Experiment.of(
        name="mine", init_fn=init, loss_fn=loss_fn, has_model_state=True, steps=10,
        optimizer=optax.chain(
            optax.adam(1e-3), optax.GradientTransformation(lambda p: optax.EmptyState(), update)),
        batch={"x": row, "y": row}, train_batches=stream,
        layout=jt.Layout().with_({"mesh.tensor": config.tensor, "mesh.dcn_data": config.dcn_data,
                                  "zero": config.zero}),
        rules=jt.Rules([("branches/up", ("layers", None, "mlp")),
                        ("branches/down", ("layers", "mlp", None))], stacked="branches"),
        policy=jt.Policy.bf16())
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder of one's own with an experiment in it."""
    name = f"mine_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def run(capsys, *arguments):
    """Status, the table's lines as words, and what was said on standard error."""
    status, out, error = commands.run(capsys, "parity", *arguments)
    return status, [line.split() for line in out.splitlines()], error


@pytest.mark.slow
def test_gpt_agrees_on_a_mesh_and_in_an_interleaved_pipeline(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "one.txt").write_text("a cat sat on a mat. " * 200)
    (tmp_path / "two.txt").write_text("the dog did not. " * 200)
    flags = "--layers 4 --width 16 --heads 4 --seq-len 8 --global-batch 8 --held-out-bytes 10"
    # On the first mesh, which has no pipeline, layers lie as cut as in the second.
    flags += " --mesh.pipe 2 --pipeline.schedule interleaved --pipeline.virtual 2"
    layouts = "--compare-steps 2 --layout data=2,tensor=4 --layout pipe=2,data=2 --accumulate 2"
    arguments = ["experiments.gpt", *layouts.split(), "--data", str(tmp_path), *flags.split()]
    status, lines, error = run(capsys, *arguments)
    assert status == 0
    assert sum("ok" in line for line in lines) == 10
    assert sum("evaluation" in line for line in lines) == 2
    assert [line.partition(" (")[0] for line in error.splitlines()] == [
        "data=2,tensor=4: agrees",
        "pipe=2,data=2: agrees",
    ]
    assert " ".join(lines[-1]) == "2 of 2 meshes agree with one device to 1e-05"


@pytest.fixture(scope="module")
def layers():
    """A model of two layers as loss and as stages, with noise in each, and a batch."""

    def block(layer, x, batch, rng):
        noise = jax.random.bernoulli(rng, 0.5, x.shape)
        return x + layer["gain"] * jnp.tanh(x @ layer["w"]) * noise

    def head_loss(params, x, batch):
        error = jnp.square(x @ params["out"] - batch["y"]).mean(-1)
        return jt.WeightedLoss((error * batch["mask"]).sum(), batch["mask"].sum())

    stages = jt.Stages(lambda params, batch, rng: jnp.tanh(batch["x"]), block, head_loss)

    def loss_fn(params, batch, rng):
        x = stages.embed(params, batch, rng)
        for i in range(2):
            layer = jax.tree.map(lambda p, i=i: p[i], params["blocks"])
            x = block(layer, x, batch, jax.random.fold_in(rng, i))
        return head_loss(params, x, batch)

    def init_fn(rng):
        blocks = {"w": 0.3 * jax.random.normal(rng, (2, 8, 8)), "gain": jnp.ones(2)}
        return {"blocks": blocks, "out": jnp.ones((8, 2)), "number": jnp.int32(3)}

    n = np.random.default_rng(0)
    batch = {"x": n.normal(size=(16, 8)), "y": n.normal(size=(16, 2)), "mask": n.random(16)}
    return init_fn, loss_fn, stages, jax.tree.map(np.float32, batch)


def test_a_pipeline_is_compared_with_as_many_accumulated_microbatches(layers):
    init_fn, loss_fn, stages, batch = layers
    rules = [("^blocks/w", ("layers", None, None)), ("^blocks/gain", ("layers",))]
    more = {"stages": stages, "rules": rules, "layouts": ["pipe=2,data=2"]}
    # The noise of the layers is another for every microbatch.
    table = jt.parity(init_fn, loss_fn, batch, **more, accumulate=2)
    assert "1 of 1 meshes agree with one device to 1e-05" in table
    assert "pipe=2,data=2" in table
    table = jt.parity(init_fn, loss_fn, batch, **more, pipeline={"microbatches": 4})
    assert "1 of 1 meshes agree" in table


def test_parity_of_a_loss_says_what_is_wrong_and_what_to_do(layers):
    init_fn, loss_fn, _, batch = layers

    def wrong(params, batch, rng):
        loss, size = loss_fn(params, batch, rng), jax.sharding.get_abstract_mesh().size
        return jt.WeightedLoss(loss.total * (1 + 1e-3 * (size - 1)), loss.weight)

    with pytest.raises(AssertionError, match=r"on data=2 the loss .*jaxtrain.constrain") as e:
        jt.parity(init_fn, wrong, batch, layouts=["data=1", "data=2"])
    assert "1 of 2 meshes agree" in str(e.value)
    with pytest.raises(ValueError, match=r"no mesh fits, .*it takes 16 devices"):
        jt.parity(init_fn, loss_fn, batch, layouts=["data=16"])
    with pytest.raises(ValueError, match="policy 'f64' is not compared: use one of f32, bf16"):
        jt.parity(init_fn, loss_fn, batch, layouts=["data=1"], policy="f64")


@pytest.mark.parametrize("layout", ["data=4,fsdp=2,dcn_data=2", "data=2,fsdp=4,dcn_fsdp=2"])
def test_a_wrong_sum_over_a_slow_network_is_found(layout, monkeypatch):
    @jt.row_wise
    def loss_fn(params, batch, rng):
        hidden = jnp.tanh(batch @ params["blocks"]["in"] + params["blocks"]["bias"])
        error = jnp.square(hidden @ params["out"]).mean(-1)
        return jt.WeightedLoss(error.sum(), jnp.float32(len(error)))

    def init_fn(rng):  # what is called blocks is no stack of layers
        blocks = {"in": jax.random.normal(rng, (8, 16)) / 4, "bias": jnp.zeros(16)}
        return {"blocks": blocks, "out": jnp.ones((16, 8)) / 4}

    given = init_fn, loss_fn, np.random.default_rng(0).normal(size=(16, 8)).astype("f4")
    assert "1 of 1 meshes agree" in jt.parity(*given, layouts=[layout])

    for name in ("psum", "psum_scatter"):
        right = getattr(collectives, name)
        # The last is what crosses the slow network.
        wrong = lambda *args, right=right: right(*args) * (2 if args[-1] else 1)  # noqa: E731
        monkeypatch.setattr(collectives, name, wrong)
    with pytest.raises(AssertionError, match=r"the gradients of '(blocks/\w+|out)' differ"):
        jt.parity(*given, layouts=[layout])


def test_a_module_of_ones_own_agrees_and_what_does_not_fit_is_listed(capsys, module, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    status, lines, _ = run(capsys, module, "--rows", "12", "--layout=data=4", "--layout=fsdp=8")
    assert status == 0
    text = "\n".join(map(" ".join, lines))
    for part in ("loss", "gradients", "parameters", "optimizer state", "model state"):
        assert re.search(rf"^(data=4 )?{part} \S+ ok ", text, re.MULTILINE)
    assert "fsdp=8 does not fit: batch leaf 'x' has shape (12, 8)" in text
    assert "1 of 1 meshes agree" in text


@pytest.mark.filterwarnings("ignore::jaxtrain.precision.PrecisionWarning")  # its x is float32
def test_both_sides_have_the_precision_that_is_asked_for(capsys, module, monkeypatch):
    compiled, policies = parity.compile_train, []

    def note(experiment, *given, **options):
        policies.append(experiment.policy)
        return compiled(experiment, *given, **options)

    monkeypatch.setattr(parity, "compile_train", note)
    status, lines, _ = run(capsys, module, "--precision", "bf16", "--layout", "data=2")
    assert (status, policies) == (0, [jt.Policy.bf16()] * 2)
    assert " ".join(lines[-1]) == "1 of 1 meshes agree with one device to 0.02"


@pytest.mark.parametrize("fault", [0.0, 1e-2])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault_and_hides_none(fault):
    def init_fn(rng):
        one, two = jax.random.split(rng)
        params = {"w": jax.random.normal(one, (8, 16)), "out": jax.random.normal(two, (16,))}
        return params | {"bias": jnp.zeros(16)}

    def loss_fn(params, batch, rng):
        hidden = batch @ params["w"] + params["bias"]  # its mean is subtracted again
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        total = jnp.square(jnp.tanh(hidden) @ params["out"] - batch[:, 0]).sum()
        devices = jax.sharding.get_abstract_mesh().size
        total += fault * (devices - 1) * params["bias"].sum()
        return jt.WeightedLoss(total, jnp.float32(len(batch)))

    batch = 3 + np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    check = functools.partial(jt.parity, init_fn, loss_fn, batch, layouts=["data=4"], steps=1)
    if fault:
        with pytest.raises(AssertionError, match="gradients of 'bias' differ"):
            check()
        return
    table = check()
    assert re.search(r"gradients .* ok .*\(zero but for rounding: bias\)", table)
    assert "Zero but for rounding, because parameters" in table
    assert "is given the gradient of one device" in table


@pytest.mark.parametrize(
    ("fault", "layout", "off", "leaf"),
    [
        # Exact losses, gradients wrong by the size of the axis: what losses alone would not show.
        ("psum", "data=2,tensor=4", {"gradients"}, r"branches/(up|down), layer 1"),
        ("optimizer", "data=2", {"parameters"}, r"branches/(up|down), layer [01]|shift"),
        ("loss", "data=2", {"loss", "gradients"}, r"loss|branches/(up|down), layer [01]|shift"),
        ("state", "data=2", {"model state"}, "mean"),
    ],
)
def test_a_fault_is_found_and_its_leaf_named(module, fault, layout, off, leaf):
    experiment = load_experiment(module, ["--fault", fault], command="parity")
    one, many = parity.compare(experiment, layouts=["data=1", layout], steps=2)
    assert one.agrees(1e-6)
    found = {part for part, (error, _) in many.worst.items() if error > 1e-5}
    assert found == off, many.worst
    for part in off:
        error, name = many.worst[part]
        assert error > 1e-4
        assert re.fullmatch(leaf, name)


def test_a_disagreement_is_status_1(capsys, module):
    status, lines, _ = run(capsys, module, "--fault", "loss", "--layout", "data=2")
    assert status == 1
    assert any("NOT" in line for line in lines)
    assert lines[-1][:3] == ["0", "of", "1"]


def test_tolerance_decides(capsys, module):
    status, *_ = run(capsys, module, "--fault=loss", "--layout=data=2", "--tolerance=0.01")
    assert status == 0


def test_the_experiments_own_mesh_comes_first(module):
    def layouts(*flags):
        built = load_experiment(module, flags, command="parity")
        return list(parity.usual_layouts(built))

    usual = list(parity.LAYOUTS)
    assert layouts() == usual
    assert layouts("--zero", "2") == usual
    assert layouts("--tensor", "2") == ["data=4,tensor=2", *usual]
    assert layouts("--tensor", "4", "--zero", "1") == ["data=2,tensor=4,zero=1", *usual]
    assert layouts("--dcn-data", "2") == ["data=8,dcn_data=2", *usual]
    with pytest.raises(ValueError, match="tensor 3 needs 3 devices"):
        layouts("--tensor", "3")


EMPTY = """
import dataclasses

@dataclasses.dataclass
class Config: ...

def build(config): return 3
"""


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        (None, [], "there is no module 'theirs' here"),
        ("Config = 1", [], "module 'theirs' has no build: an experiment has"),
        ("build = 1", [], "module 'theirs' has no Config"),
        (
            EMPTY,
            ["--layout", "cube=2"],
            "layout 'cube=2' is not known, for 'cube': write sizes of the mesh axes",
        ),
        (EMPTY, ["--layout", "data"], "layout 'data' is not known"),
        (
            EMPTY,
            [],
            "build of module 'theirs' returns int: it must return a jaxtrain.Experiment",
        ),
    ],
)
def test_what_is_no_experiment_is_one_sentence(
    capsys, tmp_path, monkeypatch, text, arguments, sentence
):
    if text is not None:
        (tmp_path / "theirs.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(cli.sys.modules, "theirs", raising=False)
    status, lines, err = run(capsys, "theirs", *arguments)
    monkeypatch.delitem(cli.sys.modules, "theirs", raising=False)
    assert (status, lines, err.count("\n")) == (2, [], 1)
    assert sentence in err


def test_where_nothing_fits_nothing_agrees(capsys, module):
    status, _, err = run(capsys, module, "--rows", "3", "--layout", "data=2")
    assert status == 2
    assert "nothing was compared" in err


def test_a_missing_import_of_the_experiment_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_experiment("broken", [], command="parity")


def test_worst_is_relative_and_sees_what_is_not_a_number():
    b = {"small": np.full(4, 1e-3), "large": np.full(4, 1.0)}
    assert parity.worst(b, b)[0] == 0
    error, name = parity.worst(b | {"large": b["large"] * 1.5}, b)
    assert (error, name) == (pytest.approx(0.5), "large")
    # A hundredth of the root mean square counts at least: 0.01 * sqrt(1 / 2) > 1e-3.
    error, name = parity.worst(b | {"small": b["small"] * 2}, b)
    assert (error, name) == (pytest.approx(1e-3 / (0.01 * math.sqrt(0.5)), rel=1e-3), "small")
    assert parity.worst(b | {"small": np.full(4, np.nan)}, b) == (math.inf, "small")


def test_layers_are_compared_one_by_one_in_natural_order_and_cut():
    layers = np.arange(24.0).reshape(4, 2, 3)
    params = {"blocks": {"w": layers}, "out": np.ones(2)}
    for stack in (jt.Stack(), jt.Stack(virtual=2)):
        cut = stack.cut(params)
        moments = {"mu": cut, "count": np.zeros(4)}
        found = parity.groups(moments, params=jt.tree.named_leaves(cut), stack=stack)
        names = [f"mu/blocks/w, layer {i}" for i in range(4)]
        assert list(found["mu/"]) == [*names, "mu/out"]
        np.testing.assert_array_equal([found["mu/"][name] for name in names], layers)
        assert list(found["count"]) == ["count"]


CUT = dataclasses.replace(decoder.stages(decoder.tiny()), stacked=jt.Stack(virtual=3))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"rules": Rules(decoder.RULES)}, 6),
        ({"rules": Rules(stacked="layers")}, 0),
        ({"stages": decoder.stages(decoder.tiny()), "rules": Rules(stacked="layers")}, 6),
        ({"stages": CUT}, 6),
    ],
)
def test_stacked_parameters_are_those_of_the_experiments_stack(changes, layers):
    experiment = jt.Experiment.of(
        **dict.fromkeys(("init_fn", "optimizer", "batch", "train_batches")),
        **{"name": "stacked", "steps": 1, "loss_fn": len} | changes,
    )
    params = {"blocks": {"q": np.zeros((6, 3, 3))}, "embed": np.zeros((6, 3))}
    if experiment.stack.key == "blocks":
        params = experiment.stack.cut(params)
    named = jt.tree.named_leaves(params)
    (found,) = parity.groups(params, params=named, stack=experiment.stack).values()
    expected = [f"blocks/q, layer {i}" for i in range(layers)] or ["blocks/q"]
    assert list(found) == [*expected, "embed"]
    assert np.shape(found[expected[0]]) == ((3, 3) if layers else (6, 3, 3))


def test_the_usual_layouts_take_as_many_devices_as_are_simulated():
    assert {jt.Layout.parse(text).mesh.devices for text in parity.LAYOUTS} == {parity.DEVICES}
