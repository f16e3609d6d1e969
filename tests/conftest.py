"""Eight simulated CPU devices for every test; set before JAX starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without these the TPU compiler (extra `aot`) looks for a TPU to talk to, and is loud about it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
