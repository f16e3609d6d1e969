"""The loss around what a run has learned: along lines, on planes, and how sharply it curves."""
