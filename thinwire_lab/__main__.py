"""`python -m thinwire_lab`: what `thinwire` is where its script is not on the path."""

from thinwire_lab.cli import main

main()
