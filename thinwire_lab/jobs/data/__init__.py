"""Data sets: loaders of the standard files, and small ones that come with Python itself.

`Data` is what a job trains on: as many examples as `len` says, and batches of any of them. Loaders
read what a user has on disk, check it, and say what they expected where; nothing is downloaded.
"""
