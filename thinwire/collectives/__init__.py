"""Collectives sum sparse payloads whose supports differ from rank to rank.

Each returns the total and this rank's share of it, and prices itself in the same file.
"""
