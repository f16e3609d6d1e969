"""``python counting_run.py FOLDER FLAGS``: the GPT experiment, writing down which rows it reads.

Each process leaves ``FOLDER/reads-N.json``: for each corpus, by its number of rows, what was read,
and ``FOLDER/places-N.json``, from where to where in each of these rows.
"""

import collections
import json
import pathlib
import sys

import jax

from experiments.gpt import Config, build
from jaxtrain import data
from jaxtrain.run.main import main

reads, places = collections.defaultdict(list), collections.defaultdict(list)
original = data.PackedTokens.part


def counted(self, index, start, stop):
    reads[len(self)].append(index)
    places[len(self)].append((start, stop))
    return original(self, index, start, stop)


data.PackedTokens.part = counted
folder, *flags = sys.argv[1:]
main(Config, build, flags)
for name, found in (("reads", reads), ("places", places)):
    pathlib.Path(folder, f"{name}-{jax.process_index()}.json").write_text(json.dumps(found))
