"""Benchmarks: times of kernels, collectives, selectors and whole steps, and what a plan needs."""
