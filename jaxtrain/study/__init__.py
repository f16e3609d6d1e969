"""Studies: many runs of one experiment, whose flags a sampler chooses."""
