"""The hooks that every run has: one module for each kind."""
