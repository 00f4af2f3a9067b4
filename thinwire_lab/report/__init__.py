"""What was measured, as pictures; needs the extra `plots`."""
