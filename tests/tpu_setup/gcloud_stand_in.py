"""Stands in for gcloud: writes down each call, and answers as the test has laid down.

``$STAND_IN/calls.jsonl`` gets the arguments of each call. ``$STAND_IN/answers.json`` is a list of
``[words, [[status, output], ...]]``: the first of which every word is in some argument answers,
each time with the next of its answers, the last one for ever; what fails prints to standard error.
Where that is null, or nothing answers, ``ssh`` runs its command in every folder
``$STAND_IN/worker*``, as the home of one worker, and all else succeeds in silence.
"""

import json
import os
import pathlib
import subprocess
import sys

folder, given = pathlib.Path(os.environ["STAND_IN"]), sys.argv[1:]
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(given) + "\n")
answers = folder / "answers.json"
rules = json.loads(answers.read_text()) if answers.exists() else []
for words, replies in rules:
    if all(any(word in argument for argument in given) for word in words):
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        answers.write_text(json.dumps(rules))
        if reply is None:
            break
        status, output = reply
        print(output, file=sys.stderr if status else sys.stdout)
        sys.exit(status)
if "ssh" in given:
    command = given[given.index("--command") + 1]
    statuses = [
        subprocess.run(["bash", "-c", command], env=os.environ | {"HOME": str(home)}).returncode
        for home in sorted(folder.glob("worker*"))
    ]
    sys.exit(next((status for status in statuses if status), 0))
