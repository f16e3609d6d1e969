"""Evaluation of trained models: perplexity of texts, pairs of sentences, lm-evaluation-harness."""
