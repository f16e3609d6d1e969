"""Predictions of trained models for rows of a file: classes, tags, answers, texts."""
