"""Numerical operations that models share: attention, losses, rotary positions."""
