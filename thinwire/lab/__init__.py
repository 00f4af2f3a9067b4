"""The lab: local workers and measurements. Nothing in the library itself needs it."""
