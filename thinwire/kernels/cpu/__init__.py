"""Numba, for single precision on the CPU. The files of `reference` say what each one computes."""
