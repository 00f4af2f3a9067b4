"""Worlds larger than this machine: closed forms of the literature, and steps on 65,536 ranks."""
