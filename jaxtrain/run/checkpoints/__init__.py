"""Checkpoints: complete or absent, checked when they are read, restored on any mesh."""
