"""Triton, for single precision on CUDA. The files of `reference` say what each one computes.

Tested with TRITON_INTERPRET=1, never timed on a device. What has no form here runs in plain torch:
codes of positions and of single bits, and sixteen bits a number, are a few whole-tensor operations
there, and take the same bytes.
"""
