"""The networks that the reference trainings use."""
