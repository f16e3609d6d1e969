"""Runnable experiments; nothing here is needed to use jaxtrain as a library."""

import jaxtrain  # noqa: F401  before JAX, which it keeps quiet about chips that are not here
