"""Datasets: tokens.py owns the file format, <name>/prepare.py makes one dataset each."""
