"""Convergence evidence: what the papers assume, measured in a training, and a verdict."""
