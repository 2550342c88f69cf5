"""`python -m shortlist` is `shortlist`."""

from shortlist.cli import main

main()
