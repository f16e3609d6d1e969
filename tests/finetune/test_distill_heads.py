"""Encoders and vision transformers learn from teachers: by definition, by torch, on every mesh."""

import contextlib
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bert, vision
from jaxtrain import cli, data, hf
from jaxtrain.compare.parity import compare
from jaxtrain.data.enclosed import FIRST, MASK
from jaxtrain.finetune.distill import Distillation
from jaxtrain.hf.encoders import label_fields
from jaxtrain.models import convnet, decoder, encoder, vit
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.loop import fit
from jaxtrain.run.main import main, parse
from jaxtrain.run.options import RunOptions
from jaxtrain.stages import loss_from_stages
from jaxtrain.tree import named_leaves

T, ROWS, TEMPERATURE, MIX = 8, 4, 3.0, 0.7
SHARE = {"temperature": TEMPERATURE, "mix": MIX}
SIZES = {"vocab_size": 61, "seq_len": T, "layers": 2, "width": 16, "heads": 2}
MODEL, COUNTS = encoder.EncoderConfig(**SIZES), {"classes": 3, "labels": 3, "tags": 3}


def of_head(head, **given):
    own = {"head": head, "classes": COUNTS.get(head)} | given
    return dataclasses.replace(MODEL, **own)


def batch_of(head):
    """Rows that end in padding, of different weights."""
    r = np.random.default_rng(0)
    lengths = np.array([8, 5, 6, 8])
    segments = (np.arange(T) < lengths[:, None]).astype(np.int32)
    batch = {"tokens": r.integers(0, 61, (ROWS, T)).astype(np.int32), "segments": segments}
    batch["mask"] = np.array([1, 0, 2, 0.5], np.float32)
    if head in ("tokens", "tags"):
        batch["targets"] = r.integers(0, COUNTS.get(head, 61), (ROWS, T)).astype(np.int32)
        batch["mask"] = (segments * r.integers(0, 3, (ROWS, T)) / 2).astype(np.float32)
    if head == "tokens":
        batch["places"] = np.array([[0, 3], [1, 4], [5, 2], [7, 6]], np.int32)
        batch |= {name: batch[name][:, :2] for name in ("targets", "mask")}
    kinds = {"classes": r.integers(0, 3, ROWS), "score": r.normal(size=ROWS)}
    kinds |= {"labels": r.integers(0, 2, (ROWS, 3)), "spans": r.integers(0, 4, (ROWS, 2))}
    if head in kinds:
        name = "span" if head == "spans" else "label"
        kind = np.float32 if head in ("score", "labels") else np.int32
        batch[name] = kinds[head].astype(kind)
    return batch


def drawn(init, seed):
    """Parameters that say more than those of ``init``, at random."""
    r = np.random.default_rng(seed)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda x: r.normal(0, 0.5, x.shape).astype(np.float32), shapes)


def softmax(z, axis=-1):
    e = np.exp(z - z.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def defined(head, z, t, batch):
    """The loss of float64 logits of student and teacher, its two parts, and the gradient of z."""
    mask = batch["mask"].astype(np.float64)
    if head == "score":
        z, t, y = z[:, 0], t[:, 0], batch["label"]
        parts = [(mask * np.square(z - other)).sum() for other in (y, t)]
        slopes = (1 - MIX) * 2 * (z - y) + MIX * 2 * (z - t)
        return (1 - MIX) * parts[0] + MIX * parts[1], parts, (mask * slopes)[:, None]
    axis, share = -1, 1.0
    if head == "labels":
        y, share = np.stack([batch["label"], 1 - batch["label"]], -1), 1 / 3
        z, t = (np.stack([x, 0 * x], -1) for x in (z, t))
    elif head == "spans":
        y, axis, share = np.eye(T)[batch["span"]].swapaxes(1, 2), 1, 1 / 2
        seen = batch["segments"][..., None] > 0
        z, t = (np.where(seen, x, -1e9) for x in (z, t))
    else:
        y = np.eye(z.shape[-1])[batch["targets" if "targets" in batch else "label"]]
    q, p, own = (softmax(x, axis) for x in (z / TEMPERATURE, t / TEMPERATURE, z))
    weight = share * mask.reshape(mask.shape + (1,) * (z.ndim - mask.ndim))
    logs = np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))
    parts = [-(weight * y * np.log(np.maximum(own, 1e-300))).sum(), (weight * p * logs).sum()]
    slopes = weight * ((1 - MIX) * (own - y) + MIX * TEMPERATURE * (q - p))
    slopes = slopes[..., 0] if head == "labels" else slopes
    return (1 - MIX) * parts[0] + MIX * TEMPERATURE**2 * parts[1], parts, slopes


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("classes", "score", "spans")]


@pytest.mark.parametrize("head", ["tokens", "labels", "tags", *SLOW])
def test_the_last_stage_of_both_and_its_gradient_are_their_definition(head):
    config, teacher = of_head(head), of_head(head, width=24, pooling="mean")
    batch, r = batch_of(head), np.random.default_rng(2)
    inits = (functools.partial(encoder.init, each) for each in (config, teacher))
    ours, theirs = map(drawn, inits, (0, 1))
    x, y = (r.normal(size=(ROWS, T, width)).astype(np.float32) for width in (16, 24))
    loss = encoder.distillation_loss(config, teacher, **SHARE)

    def total(ours, theirs):
        found = loss(ours, x, theirs, y, batch)
        return found.total, (found, logits(config, ours, x), logits(teacher, theirs, y))

    def logits(config, params, x):
        if head != "tokens":
            return encoder._head_logits(config, params, x, batch)
        of = encoder._head_output(config, params, x, batch)
        return (of.x_BTD @ of.kernel_DV + of.bias_V)[..., :61]

    gradient = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    (grads, known), (found, *both) = gradient(ours, theirs)
    expected, parts, slopes = defined(head, *(np.asarray(a, np.float64) for a in both), batch)
    np.testing.assert_allclose(found.total, expected, rtol=2e-5)
    name = "squared_error" if head == "score" else "cross_entropy"
    told = [found.metrics[each] for each in (name, "divergence")]
    np.testing.assert_allclose(told, parts, rtol=2e-5)
    assert min(parts) > 0.05
    np.testing.assert_allclose(found.weight, batch["mask"].sum())
    assert not any(np.any(each) for each in jax.tree.leaves(known))
    if head == "spans":  # whose bias does not train
        got, wanted = grads["head"]["spans"]["kernel"], np.einsum("btd,btc->dc", x, slopes)
    else:
        bias = {"tokens": grads["head"]}.get(head) or grads["head"][
            "tags" if head == "tags" else "out"
        ]
        got, wanted = bias["bias"], slopes.reshape(-1, slopes.shape[-1]).sum(0)
        got = got[: len(wanted)]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_hidden_states_are_compared_where_tokens_are_masked_alone():
    config, teacher, batch = of_head("tokens"), of_head("tokens", width=24), batch_of("tokens")
    batch["segments"] = np.array(ROWS * [[1, 1, 1, 2, 2, 2, 2, 2]], np.int32)  # two documents
    batch["places"] = np.array(ROWS * [[0, 4, 1, 6]], np.int32)
    batch |= {"targets": batch["tokens"][:, :4], "mask": np.eye(4, dtype=np.float32) + 0.5}
    inits = (functools.partial(encoder.init, each) for each in (config, teacher))
    params, r = list(map(drawn, inits, (0, 1))), np.random.default_rng(2)
    x, y = (r.normal(size=(ROWS, T, width)).astype(np.float32) for width in (16, 24))
    loss = encoder.distillation_loss(config, teacher, hidden=0.5, **SHARE)
    found = jax.jit(loss)(params[0], x, params[1], y, batch)
    expected = 0.0
    for b, places in enumerate(batch["places"]):
        chosen = [np.asarray(a, np.float64)[b, places] for a in (x, y)]
        units = [a / np.linalg.norm(a, axis=-1, keepdims=True) for a in chosen]
        apart = np.square(units[0] @ units[0].T - units[1] @ units[1].T)
        same = batch["segments"][b, places][:, None] == batch["segments"][b, places]
        weights = same * batch["mask"][b]
        means = (weights * apart).sum(1) / np.maximum(weights.sum(1), 1e-6)
        expected += (batch["mask"][b] * means).sum()
    assert expected > 0.05
    np.testing.assert_allclose(found.metrics["relations"], expected, rtol=1e-4)
    plain = (1 - MIX) * found.metrics["cross_entropy"]
    plain += MIX * TEMPERATURE**2 * found.metrics["divergence"]
    np.testing.assert_allclose(found.total, plain + 0.5 * expected, rtol=1e-5)


IMAGE = {"image": (8, 8, 1), "classes": 5}
CONVNET = convnet.ConvNetConfig(**IMAGE, channels=(4,), hidden=8)
VIT = vit.ViTConfig(**IMAGE, patch=4, layers=2, width=16, heads=2)


def test_a_convnet_teaches_a_transformer_and_stays_as_it_is():
    r = np.random.default_rng(0)
    batch = {"image": r.random((4, 8, 8, 1), np.float32), "label": np.arange(4, dtype=np.int32)}
    batch["mask"] = np.array([1, 0, 2, 1], np.float32)
    init = functools.partial(convnet.variables, CONVNET)
    weights = jax.tree.map(np.abs, drawn(init, 1))  # variances among them
    loss = vision.taught(VIT, CONVNET, **SHARE)
    change = Distillation(None, init, loss, depth=2, weights=lambda: weights)
    student = drawn(functools.partial(vit.init, VIT), 0)
    params = change.params(student)
    jax.tree.map(np.testing.assert_array_equal, change.back(params), student)
    both = loss_from_stages(change.stages(vit.stages(VIT)))
    total = lambda params: ((found := both(params, batch, None)).total, found)  # noqa: E731
    grads, found = jax.jit(jax.grad(total, has_aux=True))(params)
    logits = [vit.logits(VIT, student, batch), convnet.logits(CONVNET, weights, batch)]
    expected, parts, slopes = defined(
        "classes", *(np.asarray(x, np.float64) for x in logits), batch
    )
    np.testing.assert_allclose(found.total, expected, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["divergence"], parts[1], rtol=1e-4)
    np.testing.assert_allclose(grads["head"]["out"]["bias"], slopes.sum(0), rtol=1e-4, atol=1e-6)
    assert not any(np.any(each) for each in jax.tree.leaves(grads["teacher"]))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows, texts, images, and models that may teach what is in them, with their tokenizer."""
    pytest.importorskip("tokenizers")
    folder, r = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    words = {"fruit": ["apple", "pear", "plum"], "metal": ["iron", "zinc", "lead"]}
    rows = [(name, " ".join(r.permuted(3 * words[name]))) for name in 40 * [*words]]
    for n, (name, text) in enumerate(rows):
        path = folder / "texts" / name / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kinds = {
        "rows": [{"text": text, "label": name} for name, text in rows],
        "others": [{"text": text, "label": name.upper()} for name, text in rows],
        "scores": [{"text": text, "label": len(text) / 7} for _, text in rows],
        "tags": [{"tokens": t.split(), "tags": [f"B-{w[0]}" for w in t.split()]} for _, t in rows],
    }
    for name, each in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    tokenizer = data.SubwordTokenizer.train((text.encode() for _, text in rows), 280)
    tokenizer = tokenizer.adding(FIRST[0], MASK[0])
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size, "layers": 3, "width": 24}
    labels = label_fields(list(words))
    model = encoder.EncoderConfig(**sizes)
    told = dataclasses.replace(model, head="classes", classes=2)
    models = {"masked": (model, encoder, {}), "told": (told, encoder, labels)}
    models["gpt"] = (decoder.DecoderConfig(**sizes), decoder, {})
    seer = dataclasses.replace(VIT, layers=3, width=24, patch=2, classes=10)
    models["vit"] = (seer, vit, label_fields(list(map(str, range(10)))))
    models["wide"] = (dataclasses.replace(seer, image=(16, 16, 1)), vit, models["vit"][2])
    for name, (config, module, fields) in models.items():
        params = jax.tree.map(lambda x: 8 * x, module.init(config, jax.random.key(7)))
        text = {} if module is vit else {"tokenizer.json": tokenizer.to_json()}
        hf.save(folder / name, config, params, fields=fields, files=text)
    return folder


SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--global-batch", "16"]
WORDS = [*SMALL, "--seq-len", "8", "--examples", "1", "--data"]
IMAGES = [*SMALL, "--model", "vit", "--optimizer.name", "adamw", "--patch", "4"]
CLASSIFY = ["rows.jsonl", "--task", "classify", "--distill.teacher"]


@pytest.mark.parametrize(
    ("of", "flags", "message"),
    [
        (bert, [*CLASSIFY, "masked"], r"teacher predicts tokens, and the student classes \(2\):"),
        (bert, ["others.jsonl", *CLASSIFY[1:], "told"], "labels fruit, metal, and the data FRUI"),
        (bert, ["texts", "--distill.teacher", "gpt"], "the form decoder, and a student of t"),
        (bert, ["texts", "--distill.teacher", "nothing"], "nothing' is neither a run nor a Hugg"),
        (bert, ["texts", "--distill.teacher", "masked", "--tokenizer", "300"], "of another toke"),
        (bert, ["texts", "--distill.teacher", "masked", "--seq-len", "16"], "16 tokens and the "),
        (bert, ["texts", "--distill.mix", "0.1"], "--distill.teacher is not given, and other fla"),
        (bert, [*CLASSIFY, "told", "--distill.hidden", "1"], "`hidden` is 1.0, and the head predi"),
        (
            bert,
            ["scores.jsonl", *CLASSIFY[1:], "told", "--target", "score", "--distill.temperature=3"],
            "--target score learns a teacher's scores by their squared error",
        ),
        (vision, ["--distill.teacher", "wide"], "the images are 8x8x1 and .* of images of 16x16x1"),
        (vision, ["--distill.teacher", "told"], "of the form encoder, and a student of the f"),
    ],
)  # fmt: skip
def test_what_cannot_teach_is_refused(of, flags, message, files):
    flags = [str(files / x) if (files / x).exists() or x == "nothing" else x for x in flags]
    with pytest.raises(ValueError, match=message):
        of.build(parse(of.Config, [*(WORDS if of is bert else IMAGES), *flags]))


def test_a_convnet_does_not_learn_from_a_teacher(files):
    given = ["--distill.teacher", str(files / "vit")]
    with pytest.raises(ValueError, match=r"--distill.teacher is not for --model convnet, whose"):
        vision.build(parse(vision.Config, given))

    with pytest.raises(ValueError, match="the student is not made of stages, of which the last"):
        Distillation(None, lambda rng: {}, lambda *given: None, depth=1).stages(None)


def test_no_flag_of_stored_answers_is_offered_where_none_are_read(capsys):
    for of in (bert, vision):
        with contextlib.suppress(SystemExit):
            parse(of.Config, ["--help"])
        assert "--distill.stored" not in (found := capsys.readouterr().out)
        assert ("--distill.hidden" in found) == (of is bert)


LAYOUTS = ["pipe=2,fsdp=2,tensor=2,pipeline.schedule=1f1b,pipeline.microbatches=4"]
LAYOUTS += ["data=2,fsdp=2,tensor=2,accumulate=2", "data=2,context=2"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxtrain.sharding.placement.UnevenWarning")  # 5 and 17 tokens
@pytest.mark.parametrize(
    ("of", "flags"),
    [
        (bert, ["texts", "--distill.teacher", "masked", "--distill.hidden", "0.5"]),
        (bert, [*CLASSIFY, "told"]),
        (vision, ["--distill.teacher", "vit"]),
        (vision, ["--distill.teacher", "convnet"]),
    ],
)
def test_meshes_and_pipelines_agree_with_one_device(of, flags, files):
    if "convnet" in flags and not (files / "convnet").exists():
        main(vision.Config, vision.build, ["--steps", "9", "--run-dir", f"{files}/convnet"])
    flags = [str(files / x) if (files / x).exists() else x for x in flags]
    flags = [*(WORDS if of is bert else IMAGES), *flags, "--optimizer.name", "adamw"]
    experiment = of.build(parse(of.Config, [*flags, "--optimizer.eps", "1e-4"]))
    assert any("teacher" in name for name in named_leaves(experiment.task.params()))
    layouts = LAYOUTS if of is bert else LAYOUTS[:2]
    for found in compare(experiment, layouts=layouts, steps=2):
        assert found.refusal is None, found
        assert found.agrees(1e-5), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name"), [("classify", "rows"), ("tags", "tags"), ("score", "scores")]
)
def test_a_run_of_rows_teaches_another_which_is_kept_alone(task, name, files, tmp_path, capsys):
    path = str(files / f"{name}.jsonl")
    own = ["classify", "--target", "score"] if task == "score" else [task]
    common = [*WORDS, path, "--task", *own, "--tokenizer", str(files / "masked/tokenizer.json")]
    main(bert.Config, bert.build, [*common, "--steps", "30", "--run-dir", f"{tmp_path}/teacher"])
    learn = [*common[:1], "1", *common[2:-2], "--distill.teacher", f"{tmp_path}/teacher"]
    learn += ["--steps", "4", "--mesh.data", "4", "--mesh.fsdp", "2"]
    main(bert.Config, bert.build, [*learn, "--run-dir", f"{tmp_path}/run", "--no-save-frozen"])
    log = map(json.loads, (tmp_path / "run/log.jsonl").read_text().splitlines())
    told = [x for x in log if "eval/loss" in x][-1]
    assert cli.main(["predict", "--run", f"{tmp_path}/run", "--data", path]) == 0
    with Checkpointer(tmp_path / "run/checkpoints") as kept:
        assert not any("teacher" in name for name, _ in kept.leaves(4))
    if task != "classify":  # what is evaluated is the student's own
        assert "eval/divergence" not in told
        assert {"tags": "eval/f1", "score": "eval/pearson"}[task] in told
    experiment = bert.build(parse(bert.Config, learn))
    options = functools.partial(RunOptions, save_frozen=False)
    whole = fit(experiment, options(run_dir=f"{tmp_path}/whole")).state
    fit(experiment.with_(steps=2), options(run_dir=f"{tmp_path}/parts"))
    parts = fit(experiment, options(run_dir=f"{tmp_path}/parts", resume=True)).state
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    capsys.readouterr()


@pytest.mark.slow
def test_masked_tokens_are_learned_as_torch_learns_them_from_transformers_bert(files, tmp_path):
    torch, library = pytest.importorskip("torch"), pytest.importorskip("transformers")
    flags = [*WORDS, f"{files}/texts", "--distill.teacher", f"{files}/masked", "--steps", "2"]
    flags += ["--distill.temperature", str(TEMPERATURE), "--distill.mix", str(MIX)]
    experiment = bert.build(parse(bert.Config, flags))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with experiment.data.train_batches(0, place) as stream:
        batch = jax.device_get(next(iter(stream)))
    model = trained.read_model(experiment.metadata.config, where="the test")
    student = jax.tree.map(lambda x: 8 * x, encoder.init(model, jax.random.key(3)))
    params = hf.load(experiment.task.params())  # the teacher's
    params = {**student, **params, "blocks": {**student["blocks"], **params["blocks"]}}
    loss = lambda params: experiment.laid.loss_fn(params, batch, None).means()["loss"]  # noqa: E731
    found, grads = jax.jit(jax.value_and_grad(loss))(params)
    hf.save(tmp_path / "student", model, student)
    ours, theirs = (
        library.BertForMaskedLM.from_pretrained(path, attn_implementation="eager").double().eval()
        for path in (tmp_path / "student", files / "masked")
    )
    given = {"input_ids": torch.tensor(batch["tokens"]).long()}
    given["attention_mask"] = torch.tensor(batch["segments"] > 0).double()
    places = torch.tensor(batch["places"]).long()
    rows = torch.arange(len(places))[:, None]
    z = ours(**given).logits[rows, places]
    with torch.no_grad():
        t = theirs(**given).logits[rows, places]
    mask, targets = torch.tensor(batch["mask"]).double(), torch.tensor(batch["targets"]).long()
    F = torch.nn.functional
    nll = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="none")
    kl = F.kl_div(
        (z / TEMPERATURE).log_softmax(-1),
        (t / TEMPERATURE).log_softmax(-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    both = (1 - MIX) * nll + MIX * TEMPERATURE**2 * kl.flatten()
    total = (both * mask.flatten()).sum() / mask.sum()
    total.backward()
    np.testing.assert_allclose(found, total.item(), rtol=1e-5)
    pairs = {
        "embed/tokens": ours.bert.embeddings.word_embeddings.weight.grad,
        "head/bias": ours.cls.predictions.bias.grad,
        "blocks/mlp/up/bias": torch.stack(
            [layer.intermediate.dense.bias.grad for layer in ours.bert.encoder.layer]
        ),
    }
    for name, wanted in pairs.items():
        got, wanted = np.asarray(named_leaves(grads)[name]), wanted.numpy()
        first = name == "embed/tokens"  # row 0 is padding, which has no gradient in torch
        got, wanted = got[first : len(wanted)], wanted[first:]
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
    assert jnp.abs(grads["head"]["bias"]).max() > 1e-4
