"""Two processes load a model: each reads its own bytes and holds little more than its shards."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxtrain import hf
from tests.workers import pretrained

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures as Linux does")
def test_each_process_reads_and_holds_its_own_shards(tmp_path):
    hf.save(tmp_path, pretrained.MODEL, pretrained.params(), max_shard_bytes=10**8)
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    line = [sys.executable, "-m", "jaxtrain", "launch", "--processes", "2"]
    line += ["--simulate-devices-per-process", "2", "--", sys.executable]
    done = subprocess.run(
        [*line, "tests/workers/pretrained.py", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("measured: ")[1] for line in done.stdout.splitlines() if "measured" in line]
    assert len(lines) == 4
    for line in lines:
        own, read, used = map(int, line.split()[1:])
        assert own < 0.51 * whole
        assert read <= own
        assert used < 1.2 * own, line
