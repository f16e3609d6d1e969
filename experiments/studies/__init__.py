"""Sweeps over one design choice each: ``python -m experiments.studies`` lists them."""
