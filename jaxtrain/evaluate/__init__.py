"""Evaluation of trained decoders: perplexity of texts, and lm-evaluation-harness."""
