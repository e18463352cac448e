"""What bench.py measures, one file for each kind; arms, cli, compare, record and runner are shared by all."""
