"""Models on the Hugging Face hub, by name: ``ORG/NAME``, or ``ORG/NAME@REVISION`` to pin one.

What is read of one (config, safetensors, tokenizer) is downloaded by ``huggingface_hub`` into its
own cache, once per host: processes of a host wait for each other at the hub's file locks. Its
environment variables hold here too: ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``.
"""

import re
from pathlib import Path

from jaxtrain.host import extras
from jaxtrain.host.distributed import from_first_process
from jaxtrain.host.paths import as_path, exists

_NAME = re.compile(r"(?P<model>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")

# No weights in other formats or variants, which some models have beside these.
FILES = (
    *("config.json", "model.safetensors", "model-?????-of-?????.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "chat_template.jinja", "generation_config.json"),
    "special_tokens_map.json",
)


def local_folder(name: str | Path, *, agree: bool = True) -> str:
    """Returns the folder of a model: ``name`` where it is one, or can be none of the hub's; else
    the one in the hub's cache, into which it is downloaded if it is not there.

    Every process calls it, and all get the commit that the first one has found; without ``agree``
    each finds its own, as before the processes have met. Raises ValueError where the package is
    missing, or the hub has no such model, or not for this login, and OSError where the hub cannot
    be reached, and its cache lacks the model.
    """
    name = str(name)
    found = _NAME.fullmatch(name)
    if found is None or exists(as_path(name)):
        return name
    model, revision = found["model"], found["revision"]
    find = lambda: _downloaded(name, model, revision)  # noqa: E731
    first = from_first_process(find) if agree else find()
    return first if exists(first) else _downloaded(name, model, Path(first).name)


def _downloaded(name: str, model: str, revision: str | None) -> str:
    needs = (
        f"there is no folder '{name}' here: a model of that name on the Hugging Face hub needs "
        "huggingface_hub"
    )
    hub = extras.load(needs, "hub", "huggingface_hub.errors")
    errors = hub.errors
    try:
        return hub.snapshot_download(model, revision=revision, allow_patterns=[*FILES])
    except errors.GatedRepoError:
        raise ValueError(
            f"the model '{model}' is gated: accept its terms on the Hugging Face hub and log in, "
            "with `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"there is no folder '{name}' here, and the Hugging Face hub has no model '{model}' "
            "that this login may read"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"the model '{model}' on the Hugging Face hub has no revision '{revision}'"
        ) from None
    except (errors.LocalEntryNotFoundError, ConnectionError):
        raise ConnectionError(
            f"there is no folder '{name}' here, and no whole copy of that model in the cache of "
            "the Hugging Face hub, which is offline or cannot be reached"
        ) from None
    except errors.HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(f"the Hugging Face hub does not give '{name}': {reason}") from None
    except errors.HFValidationError:
        raise ValueError(f"'{name}' is no folder, and no name of the Hugging Face hub's") from None
