"""What bench.py measures, one kind a file; arms, cli, compare, record and runner are shared by all."""
