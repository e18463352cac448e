"""What bench.py does, one kind of number a file: timing measures, kernels and step are benchmarks, report shows."""
