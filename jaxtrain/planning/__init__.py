"""Ahead-of-time planning: the real compilers say what a step needs, before there is a chip."""
