"""An in-memory stand-in for S3, under the paths that s3fs serves."""

import contextlib

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class S3(MemoryFileSystem):
    """What s3fs would be, in memory: whole objects only, and no folder can be renamed."""

    protocol = ("s3",)
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("s3://").strip("/")
        return f"/{path}" if path else ""

    def _open(self, path, mode="rb", **options):
        assert "a" not in mode, "an object cannot be appended to"
        return super()._open(path, mode, **options)

    def rename(self, path, target, **options):
        raise AssertionError(f"{path} renamed")


@contextlib.contextmanager
def installed():
    """Serves s3:// from an empty memory."""
    known = fsspec.registry.get("s3")
    fsspec.register_implementation("s3", S3, clobber=True)
    S3.clear_instance_cache()
    S3.store.clear()
    S3.pseudo_dirs[:] = [""]
    yield S3
    if known is not None:
        fsspec.register_implementation("s3", known, clobber=True)
