"""The command ``jaxtrain hf``: checks a Hugging Face folder, or exports a model."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jaxtrain.hf import hub, weights
from jaxtrain.hf.export_command import ExportOptions, run_export
from jaxtrain.hf.family import INERT, OFF
from jaxtrain.host import quiet
from jaxtrain.host.paths import as_path, read_json


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Reads every tensor of a folder as a parameter, writes it again in memory, and compares the
    bits in both directions; prints what maps to what. The exit status is 1 where they differ."""

    folder: tyro.conf.Positional[str]
    """Folder with config.json and model.safetensors, or shards and their index; or a name on the
    hub, ORG/NAME or ORG/NAME@REVISION, which is downloaded into the hub's cache."""


@dataclasses.dataclass(frozen=True)
class HFOptions:
    """Hugging Face weights: checks a folder; `export` is that of `jaxtrain export`."""

    action: tyro.conf.OmitArgPrefixes[
        Annotated[CheckOptions, tyro.conf.subcommand("check", prefix_name=False)]
        | Annotated[ExportOptions, tyro.conf.subcommand("export", prefix_name=False)]
    ]


def run_hf(options: HFOptions, rest: list[str]) -> int:
    """Checks or exports."""
    if isinstance(options.action, ExportOptions):
        return run_export(options.action, rest)
    quiet.start()
    return _check(as_path(hub.local_folder(options.action.folder)))


def _check(folder: Path) -> int:
    family, config = weights.read_model(folder)
    print(f"{folder}: {family.name}, {family.module.parameter_count(config):,} parameters")
    inert = sorted(read_json(folder / "config.json").keys() & (INERT | OFF.keys()))
    print(f"fields without effect here: {', '.join(inert) or 'none'}")
    tensors, wrong = 0, []
    for found in weights.check(folder):
        tensors += len(found.names)
        layers = f" to {found.names[-1]}" if len(found.names) > 1 else ""
        turned = ", transposed" if found.axes else ""
        size = "x".join(map(str, found.shape))
        print(f"{found.names[0]}{layers} ({found.dtype} {size}{turned})")
        for i, (path, shape) in enumerate(zip(found.paths, found.shapes, strict=True)):
            part = f", part {i + 1} of {len(found.paths)}" if len(found.paths) > 1 else ""
            print(f"    {path} ({'x'.join(map(str, shape))}{part})")
        wrong += [] if found.equal else [found.names[0]]
    if wrong:
        print(f"NOT the same bits: {', '.join(wrong)}")
        return 1
    if unread := weights.not_read(folder):
        print(f"not read, for the model has no such part, or has it twice: {', '.join(unread)}")
    print(f"all {tensors} tensors come back bit for bit, in both directions")
    return 0
