"""Serving of trained decoders: an engine that many requests share, and an HTTP server around it."""
