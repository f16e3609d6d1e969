"""A student's loss is torch's cross-entropy and kl_div, on every mesh, for any teacher."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain import cli, data, hf
from jaxtrain.build import build_step, make_experiment_mesh, make_state
from jaxtrain.compare.parity import worst
from jaxtrain.experiment import Experiment
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.distill import Distillation
from jaxtrain.finetune.preferences import Preferences
from jaxtrain.models import decoder
from jaxtrain.ops.losses import divergence, relations
from jaxtrain.run import trained as trained_run
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.loop import fit
from jaxtrain.run.main import main, parse
from jaxtrain.run.options import RunOptions
from jaxtrain.tree import named_leaves
from tests import problems
from tests.problems import record_gradients

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}
T, ROWS, STEPS, LAYERS = 16, 8, 2, 4
NUMBERS = {"temperature": 2.0, "mix": 0.6, "hidden": 0.5}
MODEL = decoder.DecoderConfig(vocab_size=61, seq_len=T, layers=LAYERS, width=16, heads=2)


def teacher_of(layers, **given):
    rope = {"positions": "rope", "norm": "rmsnorm", "bias": False, "logit_softcap": 5.0}
    return dataclasses.replace(MODEL, layers=layers, width=24, mlp_width=32, **rope | given)


def change_of(teacher, init=None):
    return Distillation(
        decoder.stages(teacher),
        functools.partial(decoder.init, teacher) if init is None else init,
        decoder.distillation_loss(MODEL, teacher, **NUMBERS),
        depth=MODEL.layers,
        teacher_rules=decoder.RULES,
    )


def batch_of(seed=0):
    """Rows whose masks have different sums, a row without any among them."""
    r = np.random.default_rng(seed)
    tokens = r.integers(0, MODEL.vocab_size, (ROWS, T + 1)).astype(np.int32)
    mask = (r.random((ROWS, T)) < r.random((ROWS, 1))).astype(np.float32)
    mask[2] = 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def of_torch(logits, teacher_logits, targets, mask, temperature):
    """Sums of cross-entropy and divergence, of float64 logits [N, V]."""
    from torch.nn.functional import cross_entropy, kl_div

    p, q = (logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    kl = kl_div(p, q, log_target=True, reduction="none").sum(-1)
    return (cross_entropy(logits, targets, reduction="none") * mask).sum(), (kl * mask).sum()


@pytest.mark.parametrize(
    ("chunk", "softcaps", "temperature"),
    [pytest.param(None, (None, None), 0.7, marks=pytest.mark.slow), (2, (2.0, 3.0), 3.0)],
)
def test_divergence_and_gradients_are_those_of_torch(chunk, softcaps, temperature):
    torch = pytest.importorskip("torch")
    r, V = np.random.default_rng(0), 11
    x, other = r.normal(size=(2, 6, 5)), r.normal(size=(2, 6, 7))
    kernel, teacher = r.normal(size=(5, 16)), r.normal(size=(7, 16))
    targets, mask = r.integers(0, V, (2, 6)), r.integers(0, 3, (2, 6)) * 0.5
    ours = [torch.tensor(a, requires_grad=True) for a in (x, kernel)]
    logits = [(ours[0] @ ours[1])[..., :V], (torch.tensor(other) @ torch.tensor(teacher))[..., :V]]
    for i, cap in enumerate(softcaps):
        logits[i] = (logits[i] if cap is None else cap * torch.tanh(logits[i] / cap)).reshape(-1, V)
    expected = of_torch(*logits, *(torch.tensor(a).ravel() for a in (targets, mask)), temperature)
    (0.3 * expected[0] + 2 * expected[1]).backward()

    def loss(x, kernel, other, teacher):
        how = {"vocab_size": V, "temperature": temperature, "softcaps": softcaps, "chunk": chunk}
        nll, hits, kl = divergence(x, kernel, other, teacher, targets, mask, **how)
        return 0.3 * nll + 2 * kl, (nll, hits, kl)

    arrays = [jnp.asarray(a, jnp.float32) for a in (x, kernel, other, teacher)]
    gradient = jax.jit(jax.grad(loss, range(4), has_aux=True))
    grads, (nll, hits, kl) = gradient(*arrays)
    np.testing.assert_allclose([nll, kl], [e.item() for e in expected], rtol=1e-5)
    right = logits[0].argmax(-1).numpy() == targets.ravel()
    np.testing.assert_allclose(hits, (right * mask.ravel()).sum())
    for found, wanted in zip(grads, ours, strict=False):
        np.testing.assert_allclose(found, wanted.grad, rtol=1e-4, atol=1e-5)
    assert not any(np.any(each) for each in grads[2:])


@pytest.mark.parametrize("chunk", [None, 2])
def test_relations_and_gradients_are_those_of_torch(chunk):
    torch = pytest.importorskip("torch")
    r = np.random.default_rng(0)
    x, other = r.normal(size=(2, 6, 5)), r.normal(size=(2, 6, 7))
    mask, segments = r.integers(0, 3, (2, 6)) * 0.5, np.sort(r.integers(0, 2, (2, 6)))
    mask[1, segments[1] == 1] = 0  # a document without any
    ours, expected = torch.tensor(x, requires_grad=True), 0.0
    for b in range(2):
        cosines = [
            torch.nn.functional.cosine_similarity(a[b][:, None], a[b][None], dim=-1)
            for a in (ours, torch.tensor(other))
        ]
        for t in range(6):
            weights = torch.tensor(mask[b] * (segments[b] == segments[b, t]))
            if mask[b, t]:
                apart = (cosines[0][t] - cosines[1][t]) ** 2
                expected = expected + mask[b, t] * (weights * apart).sum() / weights.sum()
    expected.backward()
    loss = lambda x, y: relations(x, y, mask, segments_BT=segments, chunk=chunk)  # noqa: E731
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, other)]
    found, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arrays)
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grads[0], ours.grad, rtol=1e-4, atol=1e-6)
    assert not np.any(grads[1])


def test_logits_of_both_are_there_a_tile_at_a_time():
    N, V, tiles = 256, 64 * 1024, 16
    arrays = [((1, N, 8), "f"), ((8, V), "f"), ((1, N, 8), "f"), ((8, V), "f")]
    arrays = [jax.ShapeDtypeStruct(*a) for a in [*arrays, ((1, N), "i"), ((1, N), "f")]]
    loss = lambda *a: divergence(*a, vocab_size=V, chunk=N // tiles)[2]  # noqa: E731
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile()
    # A few tiles of what the logits of a model are whole, and kernels.
    size, kernel = 4 * N * V, 4 * 8 * V
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 8 * size / tiles + 6 * kernel < 0.8 * size
    )


@pytest.mark.parametrize("layers", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 3))])
def test_layers_of_the_teacher_go_with_the_students_whatever_their_number(layers):
    torch = pytest.importorskip("torch")
    teacher, batch = teacher_of(layers), batch_of()
    weights = decoder.init(teacher, jax.random.key(1))
    change = change_of(teacher, lambda rng: weights)
    student = decoder.init(MODEL, jax.random.key(0))
    params = change.params(student, jax.random.key(2))
    found = jax.jit(jt.loss_from_stages(change.stages(decoder.stages(MODEL))))(params, batch, None)
    logits = [
        torch.tensor(np.asarray(decoder.logits(*model, batch["tokens"]), np.float64))
        for model in ((MODEL, student), (teacher, weights))
    ]
    rest = (torch.tensor(batch[name]).ravel() for name in ("targets", "mask"))
    flat = (each.reshape(-1, MODEL.vocab_size) for each in logits)
    nll, kl = (
        x.item()
        for x in of_torch(*flat, *(r.long() if r.dtype == torch.int32 else r for r in rest), 2.0)
    )
    means, weight = found.means(), batch["mask"].sum()
    assert found.weight == weight
    np.testing.assert_allclose(means["cross_entropy"], nll / weight, rtol=1e-5)
    np.testing.assert_allclose(means["divergence"], kl / weight, rtol=1e-4)
    loss = (0.4 * nll + 0.6 * 4 * kl) / weight + 0.5 * means["relations"]
    np.testing.assert_allclose(means["loss"], loss, rtol=1e-4)
    assert means["relations"] > 0
    assert jax.tree.structure(change.back(params)) == jax.tree.structure(student)


def experiment_of(layers, **given):
    plain = problems.with_layout({
        "name": "distil",
        "init_fn": functools.partial(decoder.init, MODEL),
        "loss_fn": None,
        "stages": decoder.stages(MODEL),
        "optimizer": optax.chain(record_gradients(), jt.make_optimizer("adamw", 1e-3, eps=1e-4)),
        "rules": decoder.RULES,
        "batch": batch_of(),
        "train_batches": None,
        "steps": STEPS,
        "gather": "model",
        "pipeline": {"microbatches": 4, "schedule": "1f1b"},
    } | given)  # fmt: skip
    return apply(Experiment.of(**plain), change_of(teacher_of(layers)))


@functools.cache
def trained(axes=(), accumulate=1, schedule="1f1b", layers=6):
    """Metrics, gradients, moments and parameters after some steps on a batch."""
    pipeline = {"microbatches": 4, "schedule": schedule}
    experiment = experiment_of(layers, mesh=dict(axes), accumulate=accumulate, pipeline=pipeline)
    mesh = make_experiment_mesh(experiment, jax.devices()[: math.prod(dict(axes).values())])
    state = make_state(experiment, mesh)
    how = {"mesh": mesh, "compiler_options": FAST} | experiment.compiled_with
    batch = batch_of()
    train = jt.compile_step(build_step(experiment, state, mesh), state, batch, **how)
    before = jax.device_get(state.params)
    for _ in range(STEPS):
        state, metrics = train(state, batch)
    kept = named_leaves(state.params).items()
    assert all((x == named_leaves(before)[n]).all() for n, x in kept if "teacher" in n)
    moments = [n for n in named_leaves(state.opt_state) if "/mu/" in n]
    assert moments
    assert not [name for name in moments if "teacher" in name]
    names = ("loss", "weight", "accuracy", "cross_entropy", "divergence", "relations", "grad_norm")
    found = {name: metrics[name] for name in names}
    return jax.device_get((found, state.opt_state, state.params))


MESHES = [
    ((("pipe", 2), ("fsdp", 2), ("tensor", 2)), 1, "1f1b"),
    ((("data", 2), ("fsdp", 2), ("tensor", 2)), 2, "1f1b"),
    ((), 4, "1f1b"),
    ((("pipe", 4), ("data", 2)), 1, "gpipe"),
    ((("data", 4), ("tensor", 2)), 1, "1f1b"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "accumulate", "schedule"),
    MESHES,
)
def test_accumulation_meshes_and_pipelines_agree_with_one_device(axes, accumulate, schedule):
    for found, expected in zip(trained(axes, accumulate, schedule), trained(), strict=True):
        error, where = worst(found, expected)[:2]
        assert error < 1e-5, where


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        words = np.random.default_rng(i).choice(["stage", "mesh", "shard", "loss"], 40)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return str(folder)


@pytest.mark.slow
def test_a_run_learns_from_another_and_leaves_it_out_of_what_it_keeps(texts, tmp_path, capsys):
    common = ["--data", texts, "--model", "llama-1b", "--heads", "4", "--seq-len", "32"]
    common += ["--global-batch", "8", "--held-out-bytes", "500", "--sample-tokens", "4"]
    teach = ["--layers", "3", "--width", "32", "--steps", "30", "--run-dir", f"{tmp_path}/teacher"]
    main(gpt.Config, gpt.build, [*common, *teach])
    learn = [*common, "--layers", "2", "--width", "16", "--steps", "4"]
    learn += ["--distill.teacher", f"{tmp_path}/teacher", "--mesh.data", "4", "--mesh.tensor", "2"]
    run = ["--run-dir", f"{tmp_path}/student", "--no-save-frozen"]
    main(gpt.Config, gpt.build, [*learn, *run])
    bits = re.findall(r"held-out loss (\S+) bits per byte", capsys.readouterr().out)[-1]
    log = (tmp_path / "student/log.jsonl").read_text().splitlines()
    last = [x for x in map(json.loads, log) if "eval/cross_entropy" in x][-1]
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/cross_entropy"]))
    assert float(bits) == pytest.approx(last["eval/cross_entropy"] / math.log(2), rel=0.05)
    model, params, _ = trained_run.load(f"{tmp_path}/student")
    assert (model.layers, model.width) == (2, 16)
    wanted = {"teacher": {"final_norm": {"scale": jnp.ones(32)}}}
    with (
        Checkpointer(tmp_path / "student/checkpoints") as kept,
        pytest.raises(ValueError, match="teacher"),
    ):
        kept.restore_params(wanted, 4)
    asked = ["--run", f"{tmp_path}/student", "--prompt", "loss", "--max-tokens", "3"]
    assert cli.main(["generate", *asked]) == 0
    out = str(tmp_path / "hf")
    assert cli.main(["hf", "export", "--run", f"{tmp_path}/student", "--out", out]) == 0
    exported = hf.load(hf.open_weights(out))
    jax.tree.map(np.testing.assert_array_equal, exported, params)

    experiment = gpt.build(parse(gpt.Config, learn))
    assert (
        experiment.task.flops_per_step
        > gpt.build(parse(gpt.Config, learn[:-6])).task.flops_per_step
    )
    options = functools.partial(RunOptions, save_frozen=False, sample_seconds=0)
    whole = fit(experiment, options(run_dir=f"{tmp_path}/whole")).state
    fit(experiment.with_(steps=2), options(run_dir=f"{tmp_path}/parts"))
    parts = fit(experiment, options(run_dir=f"{tmp_path}/parts", resume=True)).state
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    _, known, _ = trained_run.load(f"{tmp_path}/teacher")
    found = whole.params
    np.testing.assert_array_equal(found["teacher"]["embed"]["tokens"], known["embed"]["tokens"])
    kernel = np.asarray(found["blocks"]["teacher"]["mlp"]["up"]["kernel"])
    assert kernel.shape[:2] == (2, 2)
    np.testing.assert_array_equal(
        kernel.reshape(4, 32, -1)[:3], known["blocks"]["mlp"]["up"]["kernel"]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--distill.mix", "0.1"], "--distill.teacher is not given, and other flags"),
        (["--distill.teacher", "T", "--z-loss", "0.1"], "--z-loss 0.1 and --distill.teacher are l"),
        (["--distill.teacher", "T", "--seq-len", "32"], "the teacher in '.*' 16 positions: g"),
        (["--distill.teacher", "T", "--init-from", "S"], "has 61 tokens in tables of 64 rows, and"),
        (["--distill.teacher", "S", "--distill.mix", "2"], "`mix` is 2.0, and is a share"),
        (["--distill.teacher", "S", "--distill.temperature", "0"], "`temperature` is 0.0: give"),
        (["--distill.teacher", "S", "--distill.hidden", "-1"], "`hidden` is -1.0, and is a weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused(given, message, tmp_path):
    for name, vocab in (("T", 61), ("S", 257)):
        model = dataclasses.replace(MODEL, vocab_size=vocab)
        hf.save(tmp_path / name, model, decoder.init(model, jax.random.key(0)))
    given = [str(tmp_path / x) if x in ("T", "S") else x for x in given]
    with pytest.raises(ValueError, match=message):
        gpt.outline(parse(gpt.Config, ["--seq-len", "16", "--tokenizer", "bytes", *given]))


def test_a_teacher_of_other_tokens_is_refused(texts, tmp_path):
    pytest.importorskip("tokenizers")
    model = dataclasses.replace(MODEL, vocab_size=300)
    hf.save(tmp_path / "model", model, decoder.init(model, jax.random.key(0)))
    given = ["--data", texts, "--seq-len", "16", "--tokenizer", "bytes"]
    given += ["--distill.teacher", str(tmp_path / "model")]
    with pytest.raises(ValueError, match=r"has no tokenizer.json: give a run, or a f"):
        gpt.build(parse(gpt.Config, given))
    documents = (x.text for x in data.text_folder(texts).train)
    data.SubwordTokenizer.train(documents, 290).save(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"of another tokenizer than this text's: give a run"):
        gpt.build(parse(gpt.Config, given))


def test_a_model_has_one_loss():
    with pytest.raises(
        ValueError, match="Distillation and Preferences each have a loss of their own"
    ):
        apply(experiment_of(6), Preferences(lambda params, x, batch: x))
