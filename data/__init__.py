"""Datasets: tokens.py defines the file format, each <name>/prepare.py makes a dataset."""
