"""Batches of a token store in S3, by a server on this machine, against those of one on a disk."""

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np

from experiments.bench import Rounds, Variant, row
from jaxtrain import data
from jaxtrain.data.sources import Documents, Split
from jaxtrain.host.paths import cache_folder


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Random batches of a store in S3, once with nothing kept and once with all of it on the disk,
    against those of a store on a disk. It needs moto and s3fs (the extra servers)."""

    tokens: int = 8_000_000
    """Tokens of the store."""
    rows: int = 16
    """Rows of a batch."""
    seq_len: int = 1024
    """Tokens per row."""
    batches: int = 20
    """Batches of a round."""
    rounds: int = 7


def main(config: Config) -> None:
    """Runs the row and prints it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        os.environ["XDG_CACHE_HOME"] = folder
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            _measure(config, Path(folder))
        finally:
            server.kill()


def _measure(config: Config, folder: Path) -> None:
    fsspec.filesystem("s3").mkdir("bucket")
    drawn = np.random.default_rng(0).integers(32, 127, config.tokens, np.uint8).tobytes()
    texts = [data.Document(str(at), drawn[at : at + 5000]) for at in range(0, len(drawn), 5000)]
    split = Split(Documents(lambda: iter(texts)), Documents(lambda: iter(texts[:1])))

    def reading(path: str | Path, *, forgets: bool = False) -> Variant:
        corpus = data.write_store(split, data.ByteTokenizer(), path).corpus()
        rows = data.PackedTokens(corpus, config.seq_len)
        batches, starts = data.Batches(rows, global_batch=config.rows, seed=0), itertools.count()

        def read() -> None:
            for kept in (cache_folder() / "blocks").iterdir() if forgets else ():
                kept.unlink()
            start = next(starts) * config.batches
            for step in range(start, start + config.batches):
                batches.batch(step)

        return Variant(read)

    variants = {
        "disk": reading(folder / "store"),
        "bucket": reading("s3://bucket/store", forgets=True),
        "bucket, kept": reading("s3://bucket/store"),  # what the one before has just asked for
    }
    tokens = config.batches * config.rows * config.seq_len
    about = {"batch": (config.rows, config.seq_len), "tokens_per_round": tokens}
    row("bucket", config, variants, about)
