"""The report of a run: one HTML file that says whether it is well, and why not."""
