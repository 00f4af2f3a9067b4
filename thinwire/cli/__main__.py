"""`python -m thinwire.cli`: what `thinwire` is where its script is not on the path."""

from thinwire.cli import main

main()
