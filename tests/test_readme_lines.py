"""Shell lines of the READMEs run as they are typed, with fewer steps and smaller models.

What a line names (a run, a store, a folder of images) is made first; what it needs and a test has
not is in :data:`ABSENT`, with the reason. A new line is one or the other.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import cli
from jaxtrain.run.main import parse
from tests.test_readme import MODULE

ROOT = pathlib.Path(__file__).parents[1]

# Lines in which one of these is found are not run.
ABSENT = {
    r"^pytest": "these tests themselves",
    r"^pip install": "the network; the extras are looked up",
    r"--trackers wandb": "the package wandb",
    r"^jaxtrain launch": "a GPU for each of 8 processes; tests/run/test_launch.py starts two",
    r"^jaxtrain watch (?!.*--terminal)": "a browser: it serves until it is interrupted",
    r"BUCKET": "a bucket; tests/run/test_buckets.py starts servers of S3 and Google's storage",
    r"^jaxtrain verify": "a run of 300 steps; the tests of receipts verify shorter ones",
    r"--append|^jaxtrain retrain": "new text; tests of growing stores and retraining have it",
    r"^jaxtrain study": "the file of a space; tests/study/test_command.py has one",
    r"-m experiments\.studies": "minutes; tests/experiments/test_studies.py has each, made small",
    r"^jaxtrain runs": "runs/ of so many; tests/study/test_runs.py has some",
    r"^jaxtrain coordinates": "its verdict needs widths; tests/models/test_mup.py has two",
    r"^jaxtrain serve": "it serves until it is interrupted; tests/serve/test_command.py starts it",
    r"^curl": "a server; tests/serve/test_classify.py and test_sources.py start some",
    r"--tasks hellaswag": "the harness's tasks; tests/evaluate has some of its own",
    r"^tpu_setup/|^export TPU_": "gcloud; tests/tpu_setup runs the scripts with stand-ins",
    r"^set [-+]a|^\. ": "the shell of a GPU host",
    r"^plan=|^\$plan|128x8|256x8|8x8x16": "minutes of compiling for 1,024 chips or more",
}
# What is run every day; the others take minutes in all.
DAILY = ("--mesh.data 2 --mesh.tensor 2 --mesh.fsdp 2",)

# What is typed besides, or in the place of the line's own, where these are found. The heads of the
# default models stay, for a mesh has to divide them.
TEXTS = "--data my_texts/"
SIZES = "--layers 4 --width 64 --seq-len 32"  # which groups of 64 weights divide
SMALLER = {
    r"--simulate-devices": "--simulate-devices 0",  # eight are here
    r"-m experiments\.(?!teach)\w+ (?!--resume)": "--steps 2",
    r"-m experiments\.(gpt|bert|t5) (?!--resume)": "--global-batch 16",
    r"-m experiments\.(gpt|t5) (?!--resume)": "--held-out-bytes 500",
    r"-m experiments\.gpt (?!--resume)": "--sample-tokens 4",
    r"(-m|parity|compare|scaling) experiments\.gpt (?!.*(--init-from|--resume))": SIZES,
    r"(-m|parity|compare|scaling) experiments\.(gpt|t5|bert) (?!.*(--data|--resume|--task))": TEXTS,
    r"-m experiments\.finetune": "--global-batch 8",
    r"experiments\.finetune .*(chat|pairs|judged)\.jsonl": "--seq-len 128 --sample-tokens 4",
    r"-m experiments\.(bert|t5) (?!.*(--init-from|--distill))": (
        "--layers 2 --width 32 --tokenizer 300"
    ),
    r"-m experiments\.bert .*--distill": "--layers 1 --width 32",
    r"-m experiments\.bert ": "--examples 2",
    r"-m experiments\.t5 ": "--examples 8",
    r"-m experiments.*--model (gpt2|llama)": "--heads 8",
    r"jaxtrain plan experiments(?!.*--init-from)": "--layers 2 --width 128 --heads 16 --seq-len 64",
    r"jaxtrain parity": "--layout data=2,fsdp=2",
    r"jaxtrain compare": "--rounds 2 --block-steps 1",
    r"jaxtrain predict .*questions": "--stride 4",
    r"jaxtrain landscape": "--points 3 --batches 1 --iterations 2",
    r"jaxtrain noise": "--microbatches 3",
    r"jaxtrain shrink": "--rows 2 --held-out-rows 2 --data my_texts/",
    r"jaxtrain tokenize": "--workers 1",
    r"jaxtrain watch": "--once",
}


def commands():
    """Every command of every block of bash, as words, with the README that has it."""
    found = {}
    for path in sorted(ROOT.glob("**/README.md")):
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                lexer = shlex.shlex(line, posix=True, punctuation_chars=";&")
                lexer.whitespace_split = True
                words = []
                for word in [*lexer, ";"]:
                    if word not in (";", "&&"):
                        words.append(word)
                    elif words:
                        found[" ".join(words)] = words
                        words = []
    return found


COMMANDS = commands()
RUN = [text for text in COMMANDS if not any(re.search(found, text) for found in ABSENT)]


def smaller(words):
    text, given = " ".join(words) + " ", {}
    for found, flags in SMALLER.items():
        if re.search(found, text):
            flags = flags.split()
            given |= dict(zip(flags[::2], [*flags[1::2], None], strict=False))
    kept = [w for i, w in enumerate(words) if not {w, words[max(0, i - 1)]} & given.keys()]
    return kept + [word for pair in given.items() for word in pair if word is not None]


def run(words):
    """Runs a command in this process; it has to end well."""
    if "--rounding" in words:  # it wants one device, and eight are here
        env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        assert not subprocess.run([sys.executable, "-m", *words], env=env, check=False).returncode
    elif words[0] == "jaxtrain":
        assert cli.main(words[1:]) == 0, words
    else:
        module = importlib.import_module(words[2])
        if words[2] == "experiments.finetune":
            return module.main(words[3:])
        if words[2] == "experiments.teach":
            return module.main(parse(module.Config, words[3:]))
        jt.main(module.Config, module.build, words[3:])


def make_texts():
    for name in ("my_texts", "texts", "text"):
        for i in range(21):  # with as many, a text of each folder is held out
            pathlib.Path(name, "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
            words = ["stage", "bubble", "mesh", "shard", "loss", "step", "abc"[i % 3]]
            order = np.random.default_rng(i).integers(0, len(words), 300)
            text = " ".join(words[j] for j in order)
            pathlib.Path(name, "abc"[i % 3], f"{i}.txt").write_text(text)


def make_images():
    images = pytest.importorskip("PIL.Image")
    for n, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (48, 8, 8, 3), np.uint8)):
        pathlib.Path("FOLDER", "abc"[n % 3]).mkdir(parents=True, exist_ok=True)
        images.fromarray(pixels).save(pathlib.Path("FOLDER", "abc"[n % 3], f"{n}.png"))
    np.savez("images.npz", images=np.zeros((9, 8, 8, 3), np.uint8))


def make_conversations():
    said = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "7"}]
    other = {"role": "assistant", "content": "none"}
    rows = [{"messages": [*said, said[0] | {"content": f"and {n}?"}, said[1]]} for n in range(90)]
    asked = [said[0] | {"content": f"{n}?"} for n in range(90)]
    pairs = [{"chosen": [one, said[1]], "rejected": [one, other]} for one in asked]
    judged = [
        {"prompt": one["content"], "completion": said[1]["content"], "label": n % 3 > 0}
        for n, one in enumerate(asked)
    ]
    for name, lines in (("chat.jsonl", rows), ("pairs.jsonl", pairs), ("judged.jsonl", judged)):
        pathlib.Path(name).write_text("\n".join(map(json.dumps, lines)))


def make_rows():
    label = ["few", "many"]
    csv = [f"stage {n} of {n},{label[n % 2]},{'abc'[n % 3]}" for n in range(90)]
    pathlib.Path("rows.csv").write_text("\n".join(["text,label,group", *csv]))
    rows = [{"source": f"count {n}", "target": label[n % 2]} for n in range(90)]
    pathlib.Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tagged = [{"tokens": ["stage", str(n)], "tags": ["O", "B-N"]} for n in range(90)]
    answers = [{"text": [str(n)], "answer_start": [6]} for n in range(90)]
    asked = [
        {"question": "which?", "context": f"stage {n}", "answers": each}
        for n, each in enumerate(answers)
    ]
    for name, lines in (("names.jsonl", tagged), ("questions.jsonl", asked)):
        pathlib.Path(name).write_text("\n".join(map(json.dumps, lines)))


def make_labels():
    csv = [f"stage {n},step {n % 7},{n % 7 / 2}" for n in range(90)]
    pathlib.Path("scores.csv").write_text("\n".join(["text,text_pair,label", *csv]))
    rows = [{"text": f"stage {n}", "label": ["few", "many"][: n % 3]} for n in range(90)]
    pathlib.Path("named.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_sentence_pairs():
    rows = [f"he has {n},she has {n},{'ab'[n % 2]}" for n in range(9)]
    pathlib.Path("pairs.csv").write_text("\n".join(["more,less,kind", *rows]))


def make_module():
    pathlib.Path("sine.py").write_text(MODULE)


# What makes the things that lines name: by what is found in the line, and in this order.
LLAMA = "--model llama-1b --heads 4"
TOKENIZE = "jaxtrain tokenize --workers 1 --data"
SHORT = "--data texts/ --steps 2 --layers 2 --width 32 --tokenizer 300 --examples"
GPT_RUN = f"python -m experiments.gpt --data texts/ {SIZES} --global-batch 8 --held-out-bytes 500"
GPT_RUN += " --sample-tokens 0 --steps 40 --save-every 20 --run-dir"
MODELS = r"^(?!.*rows\.csv).*MODEL|PAIRS|runs/q?lora|from runs/pruned|run runs/tuned"
MADE = {
    r".": [make_texts],
    r"FOLDER|VIT": [make_images],
    r"chat\.jsonl|(pairs|judged)\.jsonl|PAIRS": [make_conversations],
    r"rows\.|names\.|questions\.": [make_rows],
    r"pairs\.csv": [make_sentence_pairs],
    r"scores\.|named\.": [make_labels],
    r"sine": [make_module],
    r"python -m sine --resume": ["python -m sine --steps 2 --global-batch 16"],
    r"data STORE|=0.7:STORE|--data STORE": [f"{TOKENIZE} texts/ --tokenizer 300 --out STORE"],
    r"COPY": [f"{TOKENIZE} texts/ --tokenizer 300 --out COPY"],
    r":OTHER": [f"{TOKENIZE} my_texts/ --tokenizer STORE/tokenizer.json --out OTHER"],
    r"--init-from SUMS": [
        "python -m experiments.gpt --data sums --steps 2 --layers 2 --width 96 --heads 2 "
        "--seq-len 64 --sample-tokens 0 --run-dir SUMS"
    ],
    r"--init-from CLIP": [
        "python -m experiments.clip --data FOLDER --steps 2 --global-batch 32 --run-dir runs/clip",
        "jaxtrain hf export --run runs/clip --out CLIP",
    ],
    r"caption --init-from RUN": [
        "python -m experiments.caption --steps 2 --global-batch 16 --run-dir RUN"
    ],
    r"ENCODER": [
        f"python -m experiments.bert {SHORT} 2 --run-dir runs/words",
        "jaxtrain hf export --run runs/words --out ENCODER",
    ],
    r"rows\.csv.*MODEL": [
        f"python -m experiments.bert {SHORT} 2 --run-dir runs/words",
        "jaxtrain hf export --run runs/words --out MODEL",
    ],
    rf"tokenizer\.json --save|{MODELS}": [f"{GPT_RUN} runs/base --tokenizer 300 {LLAMA}"],
    r"tokenizer\.json --save": [lambda: shutil.copy("runs/base/tokenizer.json", ".")],
    MODELS: ["jaxtrain hf export --run runs/base --out MODEL"],
    r"from runs/pruned|run runs/tuned": [
        "jaxtrain shrink MODEL --data texts/ --out runs/pruned --prune 2:4 --rows 2"
    ],
    r"run runs/tuned": [
        f"{GPT_RUN} runs/tuned --init-from runs/pruned --keep-zeros --quantize-aware int4".replace(
            SIZES, "--seq-len 32"
        ),
    ],
    r"--run runs/lora|ADAPTER": [
        f"{GPT_RUN} runs/lora --init-from MODEL --lora.rank 2".replace(SIZES, "--seq-len 32")
    ],
    r"--run runs/qlora": [
        f"{GPT_RUN} runs/qlora --init-from MODEL --lora.rank 2 --quantize nf4".replace(
            SIZES, "--seq-len 32"
        ),
        lambda: pathlib.Path("README.md").write_text("a text " * 9),
    ],
    r"--adapter ADAPTER": ["jaxtrain hf export --run runs/lora --out ADAPTER --adapter"],
    r"data PAIRS": [
        f"{TOKENIZE} pairs.jsonl --tokenizer MODEL/tokenizer.json --chat-template chatml "
        "--out PAIRS",
    ],
    r"teach |distill.stored": [f"{GPT_RUN} runs/gpt-1".replace("texts/", "STORE")],
    r"distill.stored": [
        "python -m experiments.teach --distill.teacher runs/gpt-1 --distill.temperature 1 "
        "--data STORE --seq-len 32 --top 16 --out answers/"
    ],
    r"gpt --distill.teacher runs/gpt-1|runs/gpt-1(?! --distill)|watch|gpt --resume": [
        f"{GPT_RUN} runs/gpt-1"
    ],
    r"runs/gpt-2": [f"{GPT_RUN} runs/gpt-2"],
    r"teacher runs/teacher": [f"{GPT_RUN} runs/teacher"],
    r"--run RUN": [f"{GPT_RUN} RUN {LLAMA}"],
    r"(--init-from|teacher) runs/masked": [
        f"python -m experiments.bert {SHORT} 2 --run-dir runs/masked"
    ],
    r"teacher runs/convnet": [
        "python -m experiments.vision --channels 4 --steps 2 --run-dir runs/convnet"
    ],
    r"(evaluate --run|teacher) runs/classes": [
        f"python -m experiments.bert --task classify {SHORT} 2 --run-dir runs/classes".replace(
            "texts/", "rows.csv"
        )
    ],
    r"--init-from runs/spans|--run runs/spans": [
        f"python -m experiments.t5 {SHORT} 8 --run-dir runs/spans"
    ],
    **{
        rf"(predict|evaluate) --run runs/{name}": [
            f"python -m experiments.{of} {SHORT} 2 --run-dir runs/{name} --task {task} "
            f"--data {rows}"
        ]
        for name, of, task, rows in (
            ("told", "bert", "classify", "rows.csv"),
            ("tags", "bert", "tags", "names.jsonl"),
            ("answers", "bert", "answers", "questions.jsonl --seq-len 24 --stride 4"),
            ("targets", "t5", "rows", "rows.jsonl"),
        )
    },
    r"runs/images": [
        "python -m experiments.vision --data FOLDER --channels 4 --steps 2 --run-dir runs/images"
    ],
    r"(--init-from|--model) VIT": [
        "python -m experiments.vision --model vit --data FOLDER --image-size 8 --steps 2 "
        "--optimizer.name adamw "
        "--run-dir runs/vit",
        "jaxtrain hf export --run runs/vit --out VIT",
    ],
}


def test_every_reason_has_a_line_and_extras_are_there():
    for found in ABSENT:
        assert any(re.search(found, text) for text in COMMANDS), found
    assert [sum(each in text for text in RUN) for each in DAILY] == [1] * len(DAILY)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in COMMANDS:
        if text.startswith("pip install"):
            named = re.fullmatch(r"pip install -e \.(\[([\w,]+)\])?", text)[2]
            assert set((named or "test").split(",")) <= set(known), text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(x, marks=[] if any(each in x for each in DAILY) else pytest.mark.slow)
        for x in RUN
    ],
)
def test_a_line_runs_as_it_is_typed(text, tmp_path, monkeypatch, capsys):
    if re.search(r"--budget|--depth|experiments\.federated", text):
        pytest.skip(
            "the flags of these tests contradict it: tests of the dial and of clients do not"
        )
    for chip, module in (("v5", "libtpu"), ("h[12]00", "jax_cuda12_plugin")):
        if re.search(f"--target {chip}", text) and importlib.util.find_spec(module) is None:
            pytest.skip("needs the compilers: pip install 'jaxtrain[aot]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for found, steps in MADE.items():
        for step in steps if re.search(found, text) else ():
            step() if callable(step) else run(shlex.split(step))
    run(smaller(COMMANDS[text]))
