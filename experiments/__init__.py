"""Runnable experiments; nothing here is needed to use jaxtrain as a library."""
