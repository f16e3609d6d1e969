"""What a compiled step promises, and what it says when the promise cannot be kept."""

import json
import os
import pathlib
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.compile import _check_compiled, _fix_attention, peak_bytes, use_compilation_cache
from jaxtrain.decisions import Kind, Why
from jaxtrain.sharding import overlap
from jaxtrain.state import local_bytes
from tests import problems

OPTIMIZER = optax.adam(1e-2)
STEP = jt.build_train_step(problems.loss_fn, OPTIMIZER)


def make(**axes):
    mesh = jt.make_mesh(**axes) if axes else None
    return jt.init_state(problems.init, OPTIMIZER, jax.random.key(0), mesh=mesh), mesh


def test_the_state_is_donated_in_full_and_comes_back_as_it_was_sharded():
    state, mesh = make(data=2, fsdp=4)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
    assert all(check.holds for check in train.checks), train.report()
    assert f"of {local_bytes(state):,} bytes" in train.report()
    old = state
    for seed in range(2):
        state, _ = train(state, problems.make_batch(seed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert jax.tree.map(lambda x: x.sharding, state) == shardings


def test_a_step_is_traced_once():
    traces = []

    def step(state, batch):
        traces.append(batch)
        return STEP(state, batch)

    state, mesh = make(data=8)
    jt.compile_step(step, state, problems.make_batch(), mesh=mesh)
    assert len(traces) == 1


def test_a_donated_state_is_in_memory_once():
    state = {"w": jnp.ones(10**5)}
    step = jt.compile_step(lambda state, batch: ({"w": state["w"] + 1}, batch), state, jnp.ones(1))
    assert local_bytes(state) < step.memory_bytes < 1.1 * local_bytes(state)


def test_a_program_that_keeps_its_old_state_is_reported():
    state, mesh = make(data=8)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    batch = jax.device_put(problems.make_batch(), NamedSharding(mesh, P("data")))
    not_donating = jax.jit(STEP).lower(state, batch).compile()
    donated, *_ = _check_compiled(not_donating, state, shardings)
    assert donated.name == "state donated in full"
    assert not donated.holds


def test_a_step_is_compiled_where_jax_debug_nans_donates_nothing():
    with jax.debug_nans(True):
        state, mesh = make(data=8)
        train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
        assert np.isfinite(train(state, problems.make_batch())[1]["loss"])
    assert "jax_debug_nans and jax_debug_infs keep what they" in train.report()


@pytest.mark.parametrize(
    ("option", "bad"), [("jax_debug_nans", np.nan), ("jax_debug_infs", np.inf)]
)
def test_debug_flags_of_jax_are_honoured(option, bad):
    """JAX's own check is off once ``jnp.var`` has been traced."""
    step = lambda state, x: ({"w": state["w"] + jnp.var(jnp.ones(3))}, {"loss": x.sum()})  # noqa: E731
    jax.config.update(option, True)
    try:
        train = jt.compile_step(step, {"w": jnp.ones(2)}, jnp.ones(4))
        state, _ = train({"w": jnp.ones(2)}, jnp.ones(4))
        with pytest.raises(FloatingPointError, match=f"'metrics/loss' has .*{option.upper()} is"):
            train(state, np.full(4, bad, np.float32))
    finally:
        jax.config.update(option, False)


def test_a_leaf_that_is_not_donated_or_comes_back_elsewhere_is_reported_by_name():
    mesh = jt.make_mesh(data=8)
    placed, split = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    state = {"big": jnp.ones((64, 8)), "small": jnp.ones(8)}
    state = jax.tree.map(lambda x: jax.device_put(x, placed), state)
    shardings = {"big": placed, "small": placed}

    def checks(step, **out):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings | out, None))
        found = _check_compiled(jitted.lower(state, 1.0).compile(), state, shardings)
        return {check.name: check for check in found[:2]}

    fresh = checks(lambda state, batch: ({"big": state["big"] + batch, "small": jnp.ones(8)}, 0.0))
    assert not fresh["state donated in full"].holds  # nothing reads the old one
    assert fresh["state returned as it came"].holds
    moved = checks(
        lambda state, batch: ({k: x + batch for k, x in state.items()}, 0.0), small=split
    )
    assert not moved["state returned as it came"].holds
    assert moved["state returned as it came"].found == "small moves"


def test_another_optimizer_than_that_of_the_state_is_refused():
    state, _ = make()
    step = jt.build_train_step(problems.loss_fn, jt.make_optimizer("adamw", 1e-2))
    with pytest.raises(ValueError, match="the state was made with another optimizer than the step"):
        jt.compile_step(step, state, problems.make_batch())


def test_numpy_batches_are_split_over_the_batch_axes():
    state, mesh = make(data=2, fsdp=2, tensor=2)
    train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
    placed = train.place(problems.make_batch())
    assert {s.data.shape for s in placed["x"].addressable_shards} == {
        (problems.ROWS // 4, problems.INPUTS)
    }
    assert train.place(placed)["x"] is placed["x"]


def test_numpy_batches_may_be_filled_anew_while_the_step_still_reads_them():
    """JAX on a CPU computes with the memory of arrays that begin at a multiple of 64 bytes."""
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    state = jt.init_state(problems.init, OPTIMIZER, jax.random.key(0), mesh=mesh)
    batch = problems.make_batch()
    for name, x in batch.items():
        memory = np.empty(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        batch[name] = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        batch[name][:] = x
    train = jt.compile_step(STEP, state, batch, mesh=mesh)
    on_mesh, alone = train.place(batch), jt.compile_step(STEP, state, batch).place(batch)
    local = jt.from_local_rows(batch, mesh)
    for x in batch.values():
        x[:] = 0
    for copy in (on_mesh, alone, local):
        jax.tree.map(np.testing.assert_array_equal, copy, problems.make_batch())


def test_compiling_needs_no_arrays():
    mesh = jt.make_mesh(fsdp=8)
    shapes = jt.abstract_state(problems.init, OPTIMIZER, mesh=mesh)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, problems.make_batch()))
    train = jt.compile_step(STEP, shapes, batch, mesh=mesh)
    state = jt.init_state(problems.init, OPTIMIZER, jax.random.key(0), mesh=mesh)
    assert jax.tree.map(lambda s: s.sharding, shapes) == jax.tree.map(lambda x: x.sharding, state)
    assert int(train(state, problems.make_batch())[0].step) == 1
    assert train.memory_bytes >= local_bytes(shapes)


@pytest.mark.parametrize("axes", [{}, {"data": 8}])
def test_other_shapes_are_refused_and_never_recompiled(axes):
    state, mesh = make(**axes)
    train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
    batch = problems.make_batch(rows=problems.ROWS // 2)
    with pytest.raises(ValueError, match=r"batch leaf 'mask' is float32\[8\] and the step was"):
        train(state, batch)
    with pytest.raises(ValueError, match=r"the batch has leaves \['x'\] and the step was"):
        train(state, {"x": batch["x"]})
    whole = problems.make_batch()
    with pytest.raises(ValueError, match=r"'mask' is int32\[16\] and .* for float32\[16\]: keep"):
        train(state, whole | {"mask": whole["mask"].astype(np.int32)})
    state, _ = train(state, problems.make_batch())
    assert int(state.step) == 1


def test_a_batch_that_does_not_divide_is_refused():
    state, mesh = make(data=8)
    with pytest.raises(
        ValueError, match=r"'mask' has shape \(12,\).*not divisible.*data of size 8"
    ):
        jt.compile_step(STEP, state, problems.make_batch(rows=12), mesh=mesh)


def test_a_state_off_the_mesh_is_refused():
    mesh = jt.make_mesh(data=8)
    state, _ = make()
    with pytest.raises(ValueError, match=r"state leaf 'step' .* not on the mesh: create the state"):
        jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)


def test_a_large_leaf_copied_to_every_device_is_refused():
    mesh = jt.make_mesh(fsdp=8)
    whole = NamedSharding(mesh, P())
    state = jax.device_put({"w": np.zeros((1024, 1024), np.float32)}, whole)
    with pytest.raises(ValueError, match=r"'w' of shape \(1024, 1024\) is copied whole"):
        jt.compile_step(lambda s, b: (s, {}), state, problems.make_batch(), mesh=mesh)


def test_a_step_that_changes_a_dtype_is_refused_by_name():
    def widening(state, batch):
        return {"w": state["w"].astype(jnp.float32)}, {}

    with pytest.raises(ValueError, match=r"'w' as bfloat16\[2\] and returns float32\[2\]"):
        jt.compile_step(widening, {"w": jnp.zeros(2, jnp.bfloat16)}, problems.make_batch())


def test_a_step_that_returns_no_pair_is_told_about_donate():
    with pytest.raises(ValueError, match="pass donate=False"):
        jt.compile_step(lambda s, b: s, {"w": jnp.zeros(2)}, problems.make_batch())


def test_evaluation_reads_the_state_and_leaves_it():
    state, mesh = make(data=2, fsdp=4)
    evaluate = jt.compile_step(
        jt.build_eval_step(problems.loss_fn), state, problems.make_batch(), mesh=mesh, donate=False
    )
    loss = evaluate(state, problems.make_batch())
    expected = problems.reference(jax.device_get(state.params), problems.make_batch())[0]
    assert float(loss.means()["loss"]) == pytest.approx(expected, rel=1e-5)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("host", "peak", "expected"), [(1024, 1600, 896), (300, 850, 850), (0, 850, 850)]
)
def test_a_peak_of_the_hosts_memory_is_not_that_of_a_device(host, peak, expected):
    """In MiB, of which the first row is what libtpu 0.0.52 says of a v5e."""
    sizes = {"argument": 320, "output": 256, "temp": 320, "alias": 0, "host_argument": 0}
    sizes = {f"{name}_size_in_bytes": x for name, x in (sizes | {"host_temp": host}).items()}
    sizes = types.SimpleNamespace(**sizes, peak_memory_in_bytes=peak)
    placed = types.SimpleNamespace(device_set=[types.SimpleNamespace(platform="tpu")])
    compiled = types.SimpleNamespace(memory_analysis=lambda: sizes, output_shardings=[placed])
    assert peak_bytes(compiled) == expected


def test_programs_are_kept_where_the_user_says(tmp_path, monkeypatch):
    before = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
        )
    }
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        used = use_compilation_cache()
        assert used.startswith(str(tmp_path / "jaxtrain" / "programs"))
        assert jax.config.jax_compilation_cache_dir == used
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
        monkeypatch.setattr("jaxtrain.compile.PROGRAM_BYTES", 150)
        os.makedirs(used, exist_ok=True)
        for age, name in enumerate(("new", "old", "oldest")):
            (pathlib.Path(used) / name).write_bytes(bytes(100))
            os.utime(pathlib.Path(used) / name, (1e9 - age, 1e9 - age))
        jax.config.update("jax_compilation_cache_dir", None)
        assert use_compilation_cache() == used
        deadline = time.monotonic() + 30
        while os.listdir(used) != ["new"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Told already: it stays.
        assert use_compilation_cache(tmp_path / "other") == used
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
        use_compilation_cache()
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 5
        jax.config.update("jax_compilation_cache_dir", None)
        assert use_compilation_cache(tmp_path / "other") == str(tmp_path / "other")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_batch_that_is_where_it_belongs_is_passed_on_and_any_other_is_moved():
    state, mesh = make(data=8)
    batch = problems.make_batch()
    train = jt.compile_step(STEP, state, batch, mesh=mesh)
    placed = train.place(batch)
    assert jax.tree.map(lambda x: x.sharding, placed) == train.batch_shardings
    assert train.place(placed) is placed
    elsewhere = jax.device_put(batch, jax.devices()[3])
    moved = train.place(elsewhere)
    assert jax.tree.map(lambda x: x.sharding, moved) == train.batch_shardings
    np.testing.assert_array_equal(moved["x"], batch["x"])


@pytest.mark.parametrize("axes", [{}, {"data": 8}])
def test_a_donated_state_is_refused_and_not_read(axes):
    state, mesh = make(**axes)
    train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
    new, _ = train(state, problems.make_batch())
    with pytest.raises(ValueError, match=r"this state was donated .*: use the one that the call"):
        train(state, problems.make_batch())
    assert int(train(new, problems.make_batch())[0].step) == 2


def test_a_compiled_step_is_refused_where_a_function_is_traced():
    given = jnp.ones(3), jnp.ones(2)
    train = jt.compile_step(lambda state, batch: (state, batch.sum()), *given)
    planned = lambda *given: jt.plan(train, *given, target="cpu:1", mesh={"data": 1})  # noqa: E731
    for traced in (jax.jit(train), planned):
        with pytest.raises(ValueError, match="called within what JAX traces"):
            traced(*given)


def test_a_step_without_donation_has_a_report_too():
    state, _ = make()
    step = jt.build_eval_step(problems.loss_fn)
    report = jt.compile_step(step, state, problems.make_batch(), donate=False).report()
    assert report.startswith("ok   no recompilation")


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("pipe", r"axis 'pipe' of size 2 splits no leaf of the state.* first axis is 'layers'"),
        ("context", r"axis 'context' of size 2 splits nothing in this step.* along 'sequence'"),
        ("expert", r"axis 'expert' of size 2 splits no leaf of the state.* rule with 'experts'"),
    ],
)
def test_a_mesh_axis_that_nothing_uses_is_refused(axis, message):
    state, mesh = make(data=4, **{axis: 2})
    with pytest.raises(ValueError, match=message):
        jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)


def test_a_pipe_axis_that_splits_activations_alone_is_refused():
    def loss_fn(params, batch, rng):
        return problems.loss_fn(
            params, batch | {"x": jt.constrain(batch["x"], "layers", None)}, rng
        )

    state, mesh = make(data=4, pipe=2)
    with pytest.raises(ValueError, match=r"axis 'pipe' of size 2 splits no leaf of the state"):
        jt.compile_step(
            jt.build_train_step(loss_fn, OPTIMIZER), state, problems.make_batch(), mesh=mesh
        )


def test_a_constraint_or_a_rule_uses_an_axis():
    def loss_fn(params, batch, rng):
        hidden = jt.constrain(batch["x"], "batch", "sequence") @ params["experts"]
        return jnp.square(hidden).mean()

    mesh, optimizer = jt.make_mesh(data=2, context=2, expert=2), optax.sgd(0.1)
    rules = [("experts", ("experts", None))]
    init = lambda rng: {"experts": jnp.ones((problems.INPUTS, 4))}  # noqa: E731
    state = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh, rules=rules)
    step = jt.build_train_step(loss_fn, optimizer)
    jt.compile_step(step, state, problems.make_batch(), mesh=mesh)


def test_microbatches_that_devices_cannot_share_are_refused():
    state, mesh = make(data=2, fsdp=4)
    step = jt.build_train_step(problems.loss_fn, OPTIMIZER, accumulate=4)
    with pytest.raises(
        ValueError,
        match=r"'mask' has 16 rows: accumulate=4 microbatches of 4 do not divide over the 8 devices"
        r".* multiple of 32, or fewer",
    ):
        jt.compile_step(step, state, problems.make_batch(), mesh=mesh)


def test_options_that_another_version_of_xla_had_are_left_out(monkeypatch):
    state, mesh = make(data=8)
    ours = {"xla_of_another_version": True, "xla_gpu_enable_latency_hiding_scheduler": True}
    monkeypatch.setattr(overlap, "overlap_options", lambda mesh: dict(ours))
    train = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh)
    (how,) = train.findings[Kind.HIDING]
    assert how == Why.OPTIONS(count=1, names=("xla_gpu_enable_latency_hiding_scheduler",))
    alone = jt.compile_step(STEP, state, problems.make_batch(), mesh=mesh, hide_communication=False)
    assert Kind.HIDING not in alone.findings
    own = {"mesh": mesh, "compiler_options": {"xla_unheard_of": True}}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_unheard"):
        jt.compile_step(STEP, state, problems.make_batch(), **own)


def test_each_of_several_equal_calls_of_cudnn_is_asked_for_the_same_bits():
    name, config = "__cudnn$fmhaScaleBiasSoftmaxBackward", {"cudnn_fmha_backend_config": {"a": 1}}
    form = {"custom_call_api_version": 2, "legacy_backend_config": json.dumps(config)}
    like = jax.ShapeDtypeStruct((2,), "float32")

    def twice(x):
        call = jax.ffi.ffi_call(name, like, **form)
        return jax.lax.scan(lambda x, _: (call(call(x)), None), x, length=2)[0]

    lowered = jax.jit(twice).lower(like)
    _fix_attention(lowered.compiler_ir().operation)
    text = lowered.as_text()
    assert text.count(name) == 2
    assert text.count(r"{\22a\22: 1, \22force_deterministic\22: true}") == 2
