"""What a run needs around its training step, one noun a file. Ignore it until you need it."""
