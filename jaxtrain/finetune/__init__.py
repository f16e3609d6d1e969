"""Training that begins with a trained model."""
