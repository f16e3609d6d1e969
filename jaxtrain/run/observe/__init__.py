"""Watching a run: logs, the terminal, throughput and memory."""
