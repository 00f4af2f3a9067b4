"""The laboratory: trainings, comparisons, benchmarks, proofs and reports made with thinwire.

It imports the library and is never imported by it. `thinwire_lab.cli` is the `thinwire` command.
"""
