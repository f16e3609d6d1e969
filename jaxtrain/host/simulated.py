"""Simulated devices: one processor as several devices of JAX, and the threads that they share."""

import os

import jax


def simulate_devices(count: int) -> None:
    """Makes JAX see ``count`` CPU devices; before anything else has asked it for devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault(*thread_setting(count))


def thread_setting(count: int) -> tuple[str, str]:
    """Returns the environment variable, and its value, with which ``count`` devices never starve.

    A device that waits for others in a collective holds a thread of XLA's pool, which has one per
    core of the machine or per device. Where a program has several collectives at a time, devices
    can hold all threads in different ones, and wait for ever.

    >>> thread_setting(8)
    ('NPROC', '32')
    """
    return "NPROC", str(max(4 * count, os.cpu_count() or 1))


def thread_count() -> int:
    """Returns the number of threads of XLA's pool for CPU programs, if JAX starts now.

    Bits depend on it, because XLA divides some sums among its threads. ``NPROC`` sets it; otherwise
    there is one for each core that this process may use.
    """
    setting = os.environ.get("NPROC", "")
    return int(setting) if setting.isdigit() else cpus()


def cpus() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
