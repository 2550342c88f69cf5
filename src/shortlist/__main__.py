"""Run the command line with `python -m shortlist`."""

from shortlist.cli import main

main()
