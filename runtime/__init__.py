"""Everything a run needs around its training step, one topic per file. Ignore it until you need it."""
