"""Scores against whole logits in NumPy, and tasks against the harness's own Hugging Face model."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.data import ByteTokenizer
from jaxtrain.data.chat import TEMPLATES
from jaxtrain.evaluate import command
from jaxtrain.evaluate.command import perplexity
from jaxtrain.evaluate.harness import generation_options, harness_model, written
from jaxtrain.evaluate.scoring import Row, Scorer, windows, with_all_rows
from jaxtrain.hf.opening import Opened, ends_of, open_model
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.ops.rotary import DynamicScaling
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.serve.api import Reader
from jaxtrain.serve.engine import Engine
from jaxtrain.serve.server import make_app
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.commands import refused
from tests.serve.conftest import listening

MODEL = DecoderConfig(
    vocab_size=257,
    seq_len=48,
    layers=2,
    width=32,
    heads=4,
    positions="rope",
    norm="rmsnorm",
    bias=False,
    mlp="swiglu",
    tied=False,
)


def opened(mesh):
    params = jax.tree.map(lambda x: 3 * x, decoder.init(MODEL, jax.random.key(0)))
    params = jax.device_put(params, param_shardings(params, mesh, as_rules(decoder.RULES)))
    return Opened(MODEL, params, ByteTokenizer(), "nowhere", ((256,),) * 2)


def log_softmax(model, tokens):
    params = jax.device_get(model.params)
    logits = np.float64(decoder.logits(MODEL, params, np.array([tokens]))[0])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 1}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
)
def test_rows_of_any_length_are_scored_in_their_order(mesh):
    mesh = jt.make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])
    model = opened(mesh)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, n).tolist() for n in (2, 49, 17, 18, 30)]
    rows = [Row(row, 1 + i * (len(row) - 2) // 4) for i, row in enumerate(rows)]
    likely = log_softmax(model, [65]).argmax()
    rows.append(Row([65, int(likely)], 1))
    scored = Scorer(MODEL, model.params, mesh=mesh, rows=4)(rows)
    for row, found in zip(rows, scored, strict=True):
        logp = log_softmax(model, row.tokens[:-1])
        span = range(len(row.tokens) - 1 - row.counted, len(row.tokens) - 1)
        expected = sum(logp[t, row.tokens[t + 1]] for t in span)
        assert found.logprob == pytest.approx(expected, rel=1e-5)
        assert found.is_greedy == all(logp[t].argmax() == row.tokens[t + 1] for t in span)
    assert scored[-1].is_greedy
    with pytest.raises(ValueError, match="a row of 50 tokens"):
        Scorer(MODEL, model.params, mesh=mesh)([Row([1] * 50, 3)])


def test_rows_of_few_learned_positions_are_scored():
    config = DecoderConfig(vocab_size=31, seq_len=10, layers=1, width=16, heads=2)
    params = decoder.init(config, jax.random.key(0))
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    (found,) = Scorer(config, params, mesh=mesh, rows=2)([Row(range(11), 10)])
    logp = jax.nn.log_softmax(decoder.logits(config, params, np.arange(10)[None])[0])
    expected = float(sum(logp[t, t + 1] for t in range(10)))
    assert found.logprob == pytest.approx(expected, rel=1e-5)
    for longest in (0, 11):
        with pytest.raises(ValueError, match=f"`longest` is {longest}"):
            Scorer(config, params, mesh=mesh, longest=longest)


def test_padding_does_not_scale_positions_that_are_scaled_by_the_length_of_a_row():
    sizes = {"vocab_size": 31, "seq_len": 64, "layers": 1, "width": 16, "heads": 2}
    config = DecoderConfig(**sizes, positions="rope", rope_scaling=DynamicScaling(4.0, 20))
    params = decoder.init(config, jax.random.key(0))
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    scorer, short, long = Scorer(config, params, mesh=mesh, rows=2), range(12), [1] * 21
    logp = jax.nn.log_softmax(decoder.logits(config, params, np.arange(11)[None])[0])
    expected = float(sum(logp[t, t + 1] for t in range(11)))
    found, _ = scorer([Row(short, 11), Row(long, 3)])
    assert found.logprob == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="give 2 to 21"):
        scorer([Row([1] * 22, 3)])
    with pytest.raises(ValueError, match=r"row is 21: rope_type dynamic .* at most 20 positions"):
        Scorer(config, params, mesh=mesh, longest=21)


@pytest.mark.parametrize(("count", "longest", "stride"), [(2, 8, 8), (9, 8, 3), (50, 8, 3)])
def test_windows_score_each_token_once_with_enough_before_it(count, longest, stride):
    scored = []
    for row in windows(range(count), longest=longest, stride=stride):
        assert len(row.tokens) <= longest + 1
        for token in row.tokens[-row.counted :]:
            assert token - row.tokens[0] >= min(token, longest - stride)
            scored.append(token)
    assert scored == list(range(1, count))


def test_a_long_document_is_never_in_memory_as_rows(tmp_path, monkeypatch):
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    path = tmp_path / "text.txt"
    path.write_text("What is said here is said twice. " * 4)
    scorer = Scorer(MODEL, model.params, mesh=mesh)
    whole, sizes = perplexity(str(path), model, scorer, stride=2), []
    monkeypatch.setattr(command, "ROWS", 16)

    def counted(rows):
        sizes.append(len(rows))
        return scorer(rows)

    counted.longest = scorer.longest
    found = perplexity(str(path), model, counted, stride=2)
    assert max(sizes) == 16 < sum(sizes)
    assert found == pytest.approx(whole, rel=1e-6)


def test_the_bits_of_a_text_are_those_of_its_documents(tmp_path):
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    texts = ["What is said here is said twice, said he, and was gone for good.", "é"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    scorer = Scorer(MODEL, model.params, mesh=mesh)
    found = perplexity(str(path), model, scorer, stride=20)
    nats, eod = 0.0, model.tokenizer.eod
    for text in texts:
        tokens = [eod, *text.encode()]
        done = 1
        while done < len(tokens):
            end = min(len(tokens), 49 if done == 1 else done + 20)
            start = max(0, end - 49)
            logp = log_softmax(model, tokens[start : end - 1])
            nats -= sum(logp[t - 1 - start, tokens[t]] for t in range(done, end))
            done = end
    count = sum(len(text.encode()) for text in texts)
    assert found["documents"] == 2
    assert found["tokens"] == found["bytes"] == count
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)
    with pytest.raises(ValueError, match="`stride` is 49"):
        perplexity(str(path), model, scorer, stride=49)


def test_results_of_a_run_name_the_checkpoint_that_gave_them(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_decoder", lambda *arguments: {})
    shapes = jax.eval_shape(lambda: decoder.init(MODEL, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        for step, loss in ((1, 2.0), (2, 3.0)):
            config = {"model": dataclasses.asdict(MODEL), "tokenizer": "bytes"}
            metrics = {"eval/loss": loss}
            checkpoints.save(step, {"params": params}, metrics=metrics, config=config)
    for step in (None, 2):
        options = command.EvaluateOptions(str(tmp_path / "run"), step=step, data=("a.txt",))
        command.run_evaluate(options, [])
    lines = (tmp_path / "run" / command.RESULTS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]  # the best, and the one named


@pytest.mark.parametrize("begin", [(), (256,)], ids=["of the template", "of the model"])
def test_the_answers_of_conversations_alone_are_scored(tmp_path, begin):
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)._replace(folder=str(tmp_path), begin=((256,), begin))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["plain"])
    turns = [
        ("user", "What is said here, "),
        ("assistant", "is said "),
        ("user", "twice, said "),
        ("assistant", "he, and was gone for good."),
    ]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    measured = perplexity(
        str(tmp_path / "chat.jsonl"), model, Scorer(MODEL, model.params, mesh=mesh), stride=48
    )
    tokens = [*begin, *"".join(content for _, content in turns).encode()]
    counts = [0] * len(begin) + [role == "assistant" for role, content in turns for _ in content]
    # Two rows: 48 tokens are predicted by the first, and the others by the last 49 tokens.
    halves = [(0, 48), (len(tokens) - 49, len(tokens) - 1)]
    nats, position = 0.0, 1
    for start, end in halves:
        logp = log_softmax(model, tokens[start:end])
        nats -= sum(logp[t - 1 - start, tokens[t]] for t in range(position, end + 1) if counts[t])
        position = end + 1
    assert measured["tokens"] == measured["bytes"] == sum(counts) == 34
    assert measured["perplexity"] == pytest.approx(math.exp(nats / sum(counts)), rel=1e-6)


def test_a_text_that_is_written_ends_before_what_a_task_names():
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    engine = Engine(MODEL, model.params, slots=4, chunk=16, page=16)
    ends = frozenset([model.tokenizer.eod])
    asked = [("a context", {"max_gen_toks": 12}), ("x" * 99, {"until": ["\0"], "max_gen_toks": 5})]
    whole, other = written(model.tokenizer, engine, asked, ends)
    stop = whole[4:6]
    # The stops cut one after the other, as in the harness: the second is not in what is left.
    short = [("a context", asked[0][1] | {"until": [stop, whole[3:6]]})]
    (cut,) = written(model.tokenizer, engine, short, ends)
    assert cut == whole[: whole.index(stop)]
    end = model.tokenizer.encode(whole).tolist()[3]  # a model may name more ends than one
    (cut,) = written(model.tokenizer, engine, asked[:1], ends | {end})
    assert cut == whole[: whole.index(chr(end))]
    assert other
    with pytest.raises(ValueError, match="typical_p"):
        written(model.tokenizer, engine, [("a", {"typical_p": 0.1})], ends)


@pytest.mark.parametrize(
    ("options", "limit", "drawn"),
    [
        ({"max_new_tokens": 3, "max_tokens": 4}, 3, {"temperature": 0.0}),
        ({"max_completion_tokens": 5, "num_beams": 1}, 5, {"temperature": 0.0}),
        ({"max_gen_toks": 6, "max_tokens": 4, "temperature": 0.7}, 6, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 3}, 256, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 3}, 256, {"top_k": 3, "top_p": 1.0}),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, 256, {"repetition_penalty": 1.1}),
        ({"temperature": 0.7}, 256, {"top_k": 50}),  # which transformers takes by default
    ],
)
def test_generation_options_mean_what_they_mean_to_the_harness(options, limit, drawn):
    until, most_new, most, fields = generation_options(options | {"until": "x", "max_length": 9})
    assert (until, most_new, most) == (["x"], limit, 9)
    assert fields == fields | drawn
    assert ("top_k" in fields) == (fields["temperature"] > 0)


def test_generation_options_that_would_change_a_text_are_refused():
    for options, message in (
        ({"do_sample": True}, "do_sample is true and temperature is 0"),
        ({"num_beams": 2, "until": None}, r"options \{'num_beams': 2\} are not known"),
    ):
        with pytest.raises(ValueError, match=message):
            generation_options(options)
    model = opened(jt.make_mesh(data=1, devices=jax.devices()[:1]))
    engine = Engine(MODEL, model.params, slots=2)
    with pytest.raises(ValueError, match="asks for 48 new tokens, and the model has 48 positions"):
        written(model.tokenizer, engine, [("a", {"max_gen_toks": 48})], frozenset())


def test_what_cannot_be_evaluated_is_refused(tmp_path, capsys):
    assert "neither --data nor --tasks" in refused(capsys, "evaluate", "--model", str(tmp_path))
    asked = ["evaluate", "--model", str(tmp_path), "--data", "python"]
    assert "neither a run nor" in refused(capsys, *asked)
    assert "--mesh.pipe 2" in refused(capsys, *asked, "--mesh.pipe", "2")
    assert "--stride is 0" in refused(capsys, *asked, "--stride", "0")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    model = Opened(MODEL, None, ByteTokenizer(), str(tmp_path), ((), ()))
    with pytest.raises(ValueError, match="has no chat template to read them by"):
        perplexity(str(tmp_path / "chat.jsonl"), model, None)
    (tmp_path / "pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    with pytest.raises(ValueError, match="has preferences: give rows of messages"):
        perplexity(str(tmp_path / "pairs.jsonl"), model, None)


def tasks(folder):
    """One task for each kind of request."""
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    rows = []
    for _ in range(12):
        picked = rng.choice(words, 4, replace=False).tolist()
        text = " ".join(rng.choice(words, int(rng.integers(3, 30))))
        row = {"question": f"Is {picked[0]}?", "choices": picked[1:], "text": text}
        rows.append(row | {"answer": int(rng.integers(3))})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    local = {"dataset_path": "json", "test_split": "test"}
    local["dataset_kwargs"] = {"data_files": {"test": str(path)}}
    mean = {"aggregation": "mean", "higher_is_better": True}
    choices = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}} A:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", **mean}],
    }
    rolling = {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    writes = {
        "task": "writes",
        "output_type": "generate_until",
        "doc_to_text": "Q: {{question}} A:",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    return [local | each for each in (choices, rolling, writes)]


def saved(model, folder):
    """The model's folder, and its bytes as a tokenizer of transformers, which is there too."""
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    hf.save(folder, model.model, jax.device_get(model.params))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    vocabulary = {names[b]: b for b in range(256)} | {"</s>": 256}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer, library.decoder = level, tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


@pytest.mark.slow
def test_tasks_come_to_what_the_harness_s_own_model_comes_to(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    scorer = Scorer(MODEL, model.params, mesh=mesh)
    engine = Engine(MODEL, model.params, slots=4)
    ours = harness_model(model.tokenizer, scorer, engine, [model.tokenizer.eod])
    ours = lm_eval.simple_evaluate(ours, tasks=tasks(tmp_path), bootstrap_iters=0)
    fast = saved(model, tmp_path / "model")
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = HFLM(pretrained=torch_model, tokenizer=fast, batch_size=4, max_length=48)
    theirs = lm_eval.simple_evaluate(theirs, tasks=tasks(tmp_path), bootstrap_iters=0)
    check_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("puts_begin", [True, False])
def test_texts_are_the_tokens_of_the_harness_s_own_model(puts_begin, tmp_path):
    """A beginning token, special tokens, and rows of the vocabulary that no token has."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    padded = dataclasses.replace(MODEL, vocab_size=272)
    params = jax.tree.map(lambda x: 3 * x, decoder.init(padded, jax.random.key(0)))
    tokenizers = pytest.importorskip("tokenizers")
    fast = saved(Opened(padded, params, None, "", ((), ())), tmp_path)
    fast.add_special_tokens({"bos_token": "<begin>", "additional_special_tokens": ["<turn>"]})
    if puts_begin:
        begin = [("<begin>", fast.bos_token_id)]
        fast.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<begin> $A", pair="<begin> $A $B", special_tokens=begin
        )
    fast.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    model = open_model(str(tmp_path), "decoder", mesh=mesh)
    every, ends = with_all_rows(model), ends_of(model.folder, model.tokenizer)
    scorer, engine = Scorer(every, model.params, mesh=mesh), Engine(every, model.params, slots=4)
    jaxtrain_model = harness_model(model.tokenizer, scorer, engine, ends, folder=model.folder)
    hflm = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", max_length=48)

    def both(kind, *arguments):
        requests = [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]
        return [getattr(model, kind)(requests) for model in (jaxtrain_model, hflm)]

    pairs = [("a b", " c"), ("", "d e"), ("<begin>a<turn>", "b"), ("<begin>a", " <turn>b")]
    for (x, best), (y, greedy) in zip(*both("loglikelihood", *pairs), strict=True):
        assert (x, best) == (pytest.approx(y, abs=1e-4), greedy)
    x, y = both("loglikelihood_rolling", ("a b c",), ("é" * 60,))
    assert x == pytest.approx(y, abs=1e-3)
    questions = [
        ("a b", {"max_length": 40, "max_gen_toks": 9}),
        ("<begin>b", {"max_new_tokens": 30}),
    ]
    questions += [
        ("c", {"until": ["<turn>", "e"], "max_tokens": 30, "temperature": 1, "do_sample": False})
    ]
    (x,), _ = both("generate_until", questions[0])
    questions += [("a b", {"max_new_tokens": 30, "until": next(a for a in x[3:] if a.isascii())})]
    x, y = both("generate_until", *questions)
    assert x == y
    assert all(x)


@pytest.mark.slow
def test_tasks_over_http_come_to_what_they_come_to_in_the_process(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    for name in ("aiohttp", "tenacity", "uvicorn", "starlette"):
        pytest.importorskip(name, reason=f"the harness over HTTP needs {name}")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    model = opened(mesh)
    ends = frozenset([model.tokenizer.eod])
    saved(model, tmp_path / "model")
    engine = Engine(MODEL, model.params, slots=4, longest=64)
    ours = harness_model(model.tokenizer, Scorer(MODEL, model.params, mesh=mesh), engine, ends)
    ours = lm_eval.simple_evaluate(ours, tasks=tasks(tmp_path), bootstrap_iters=0)
    reader = Reader(("small",), model.tokenizer, engine.longest, ends, None, model.begin)
    with listening(make_app(engine, reader)) as server:
        theirs = LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{server.port}/v1/completions",
            model="small",
            tokenizer=str(tmp_path / "model"),
            tokenizer_backend="huggingface",
            max_length=50,  # of which it keeps one for a new token, and one before a window
            batch_size=4,
            num_concurrent=3,
        )
        theirs = lm_eval.simple_evaluate(theirs, tasks=tasks(tmp_path), bootstrap_iters=0)
    check_same(ours, theirs)
    for task, values in ours["results"].items():
        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        assert {k: theirs["results"][task][k] for k in numbers} == pytest.approx(numbers, rel=1e-5)


def check_same(ours, theirs):
    """That two models have answered all tasks alike."""
    for task in ("choices", "rolling", "writes"):
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
                if task == "writes":
                    assert x == y
                else:
                    x, y = (v[0] if isinstance(v, tuple | list) else v for v in (x, y))
                    assert float(x) == pytest.approx(float(y), rel=1e-5, abs=1e-4)
