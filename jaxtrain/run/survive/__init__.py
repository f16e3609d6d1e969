"""Protects a run from signals, lost processes, hangs and steps that come to nothing.

Each module is one idea. ``peer_group`` joins the processes of a run, so that they agree on the step
to stop at and notice when one is gone. ``preemption`` stops the loop there. ``watchdog`` notices a
hang, ``diagnosis`` examines steps that were skipped, and ``stragglers`` compares the processes.
"""
