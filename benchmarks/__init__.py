"""What bench.py measures, one kind a file; arms, cli, compare, record, run_shape and runner are shared by all."""
