"""What bench.py measures, one file for each kind; the others (trainers, runner, records, tables, ...) are shared."""
