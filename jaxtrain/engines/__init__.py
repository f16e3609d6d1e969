"""Gradient engines: how a batch becomes summed gradients, at once, in parts and in stages."""
