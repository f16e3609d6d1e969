"""``python counting_run.py FOLDER FLAGS``: the GPT experiment, writing down which rows it reads.

Each process leaves ``FOLDER/reads-N.json``: for each corpus, by its number of rows, what was read.
"""

import collections
import json
import pathlib
import sys

import jax

from experiments.gpt import Config, build
from jaxtrain import data
from jaxtrain.run.main import main

reads = collections.defaultdict(list)
original = data.PackedTokens.__getitem__


def counted(self, index):
    reads[len(self)].append(index)
    return original(self, index)


data.PackedTokens.__getitem__ = counted
folder, *flags = sys.argv[1:]
main(Config, build, flags)
pathlib.Path(folder, f"reads-{jax.process_index()}.json").write_text(json.dumps(reads))
