"""Stands in for gcloud: writes down each call, and answers as the test has laid down.

``$STAND_IN/calls.jsonl`` gets the arguments of each call. ``$STAND_IN/answers.json`` is a list of
``[words, [[status, output], ...]]``: the first whose words are all among the arguments answers,
each time with the next of its answers, the last one for ever. All else succeeds in silence.
"""

import json
import os
import pathlib
import sys

folder, given = pathlib.Path(os.environ["STAND_IN"]), sys.argv[1:]
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(given) + "\n")
answers = folder / "answers.json"
rules = json.loads(answers.read_text()) if answers.exists() else []
for words, replies in rules:
    if set(words) <= set(given):
        status, output = replies.pop(0) if len(replies) > 1 else replies[0]
        answers.write_text(json.dumps(rules))
        print(output)
        sys.exit(status)
