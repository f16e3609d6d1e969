"""Turns a user's error into one sentence on standard error and exit status 2, without a traceback.

What is refused is what the user can mend: a value, a file, a folder, a package that is missing.
Storage that fails for a while is a sentence too, with a status that launchers restart on. Anything
else is a bug and keeps its traceback; so does a ``ValueError`` of the user's own code where that is
called back (a loss, a hook, a writer, data), for its sentence was not written for this. The library
speaks of arguments, in backticks; here they become flags.
"""

import contextlib
import dataclasses
import difflib
import itertools
import re
import sys
import sysconfig
import traceback
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.host import exit_codes, storage

# A sentence has its arguments in backticks, and nothing else that is one word.
_ARGUMENT = re.compile(r"`([\w.]+?)(=False)?`")

# What other programs call a flag, by that flag; tyro itself suggests what is spelled alike.
_ELSEWHERE = {
    "optimizer.learning-rate": "lr peak-lr max-lr",
    "optimizer.name": "optim optimizer",
    "optimizer.schedule": "lr-schedule lr-scheduler lr-scheduler-type scheduler",
    "optimizer.warmup-steps": "warmup num-warmup-steps warmup-iters",
    "optimizer.clip-norm": "grad-clip gradient-clip-val gradient-clipping max-grad-norm",
    "global-batch": "batch-size train-batch-size per-device-train-batch-size micro-batch-size",
    "accumulate": "gradient-accumulation-steps grad-accum accum-steps",
    "steps": "max-steps num-steps train-steps total-steps max-iters iterations",
    "epochs": "num-epochs num-train-epochs max-epochs",
    "seq-len": "block-size context-length sequence-length max-length max-seq-length",
    "layers": "n-layer n-layers num-layers num-hidden-layers",
    "heads": "n-head n-heads num-heads num-attention-heads",
    "width": "n-embd hidden-size d-model dim embed-dim",
    "precision": "dtype bf16 fp16 amp mixed-precision",
    "remat": "gradient-checkpointing activation-checkpointing checkpointing",
    "run-dir": "output-dir out-dir save-dir log-dir logdir workdir",
    "resume": "resume-from-checkpoint load-checkpoint ckpt",
    "eval-every": "eval-steps eval-interval eval-freq",
    "save-every": "save-steps save-interval checkpoint-every",
    "log-every": "logging-steps log-interval",
    "init-from": "pretrained model-name-or-path checkpoint load",
    "trackers": "report-to wandb tracker",
    "mesh.tensor": "tp tensor-parallel tensor-parallel-size",
    "mesh.pipe": "pp pipeline-parallel pipeline-parallel-size",
    "mesh.data": "dp data-parallel data-parallel-size",
    "max-tokens": "max-new-tokens num-tokens",
    "samples": "num-samples num-return-sequences",
    "beams": "num-beams beam-size",
}

# What calls a user's Config, build(config) and main: a ValueError of theirs refuses, as ours do.
_STARTING = {
    *("jaxtrain.cli", "jaxtrain.run.main", "jaxtrain.run.provenance", "jaxtrain.run.refusal"),
    *("jaxtrain.run.replay", "jaxtrain.planning.fitting"),
}


@contextlib.contextmanager
def refusing(*config_types: type) -> Iterator[None]:
    """Ends the program with a sentence where its body raises an error of the user's making.

    Those are ``ValueError`` (and its kinds: what is no JSON, no UTF-8, another model's or a damaged
    checkpoint), ``OSError`` (files, folders, disks), ``ImportError`` for an optional package, and
    ``FloatingPointError`` where JAX's debug flags forbid a number.
    The sentence names the program's flags, which are the fields of the given dataclasses.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads the output of a command
        raise
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        # A failed import statement is a bug, or a broken installation.
        failed_import = isinstance(error, ImportError) and error.name is not None
        by_value = isinstance(error, ValueError | FloatingPointError)
        if failed_import or (by_value and called_back(error)):
            raise
        raise refuse(error, *config_types) from None


def called_back(error: BaseException) -> bool:
    """Whether an error comes from code of the user's that was called back, or what that called."""
    foreign = False
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "jaxtrain":
            return foreign and module not in _STARTING
        filename = frame.f_code.co_filename
        stdlib = filename.startswith((sysconfig.get_path("stdlib"), "<frozen"))
        foreign = foreign or not (stdlib or "-packages" in filename)
    return False


def refuse(error: Exception, *config_types: type) -> SystemExit:
    """Prints an error as one sentence and returns the exit to raise.

    Its status is ``REFUSED``, or ``STORAGE`` where the error may be gone at the next start.
    """
    print(f"error: {with_flags(sentence(error), *config_types)}", file=sys.stderr)
    passes = isinstance(error, OSError) and storage.passes(error)
    return SystemExit(exit_codes.STORAGE if passes else exit_codes.REFUSED)


def refuse_aliases(config_type: type, arguments: Sequence[str]) -> None:
    """Ends the program where an argument is what other programs call one of its flags."""
    flags = {flag for *_, flag in all_flags(config_type)}
    known = flags & _ELSEWHERE.keys()
    names = {alias: flag for flag in known for alias in _ELSEWHERE[flag].split()}
    for word in arguments:
        typed = word.partition("=")[0].removeprefix("--").replace("_", "-")
        flag = names.get(typed.rpartition(".")[2])
        if word.startswith("--") and flag and typed not in flags:
            text = f"--{typed} is no option of this program: the same is --{flag} here"
            raise refuse(ValueError(text))


def refuse_two_names(options: type, arguments: Sequence[str]) -> None:
    """Ends the program where two names of one flag are given, of which the last would count."""
    typed = {word.partition("=")[0].replace("_", "-") for word in arguments}
    for name, hint in typing.get_type_hints(options, include_extras=True).items():
        marks = (getattr(mark, "aliases", None) or () for mark in getattr(hint, "__metadata__", ()))
        names = [f"--{name.replace('_', '-')}", *itertools.chain.from_iterable(marks)]
        if len(given := [each for each in names if each in typed]) > 1:
            text = f"{' and '.join(given)} are names of one flag: give one of them"
            raise refuse(ValueError(text))


def refuse_misspelt(command: type, config_type: type, arguments: Sequence[str]) -> None:
    """Ends the program where an argument is nearly an option of the command, and is none of the
    config's, to which tyro would compare it alone."""
    own, flags = ({flag for *_, flag in all_flags(kind)} for kind in (command, config_type))
    for word in arguments:
        typed = word.partition("=")[0].removeprefix("--").replace("_", "-")
        near = difflib.get_close_matches(typed, sorted(own | flags), n=1, cutoff=0.75)
        if word.startswith("--") and near and near[0] != typed and near[0] in own - flags:
            text = f"--{typed} is no option of this program: did you mean --{near[0]}?"
            raise refuse(ValueError(text))


def sentence(error: Exception) -> str:
    """Returns an error's text on one line, and a system error's without its number.

    >>> sentence(ValueError("two\\nlines"))
    'two lines'
    >>> sentence(PermissionError(13, "Permission denied", "/etc/shadow"))
    "Permission denied: '/etc/shadow'"
    """
    text = str(error)
    if isinstance(error, OSError) and text.startswith("[Errno "):
        text = text.partition("] ")[2]
    return " ".join(text.split()) or type(error).__name__


def with_flags(text: str, *config_types: type) -> str:
    """Names the arguments that a text has in backticks as the flags of a program.

    Flags are the fields of the given dataclasses; an annotated group of them is flat.

    >>> @dataclasses.dataclass
    ... class Optimizer:
    ...     clip_norm: float = 1.0
    >>> @dataclasses.dataclass
    ... class Config:
    ...     optimizer: Optimizer
    ...     run_dir: str = "x"
    ...     resume: bool = True
    >>> with_flags("`resume` needs `run_dir`, not metric run_dir", Config)
    '--resume needs --run-dir, not metric run_dir'
    >>> with_flags("`optimizer.clip_norm` or `clip_norm` is 0; `resume=False`", Config)
    '--optimizer.clip-norm or --optimizer.clip-norm is 0; --no-resume'
    """
    flags = {}
    for kind in config_types:  # where two fields have one name, it is the outer one's
        found = sorted(all_flags(kind), key=lambda each: each[0])
        flags |= {flag.replace("-", "_"): flag for *_, flag in found}
        flags |= {name: flag for _, name, _, flag in reversed(found)}

    def flag(found: re.Match[str]) -> str:
        name = flags.get(found[1])
        return f"--{'no-' if found[2] else ''}{name}" if name else found[0]

    return _ARGUMENT.sub(flag, text)


def all_flags(
    config_type: type, prefix: str = "", depth: int = 0
) -> Iterator[tuple[int, str, Any, str]]:
    """Every flag, with how many groups it is in, and the name and type of its field."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    for field in dataclasses.fields(config_type):
        kind, flat = hints[field.name], typing.get_origin(hints[field.name]) is typing.Annotated
        kind = typing.get_args(kind)[0] if flat else kind
        if dataclasses.is_dataclass(kind):
            yield from all_flags(kind, prefix if flat else f"{prefix}{field.name}.", depth + 1)
        else:
            yield depth, field.name, kind, f"{prefix}{field.name}".replace("_", "-")
