"""Layouts of other systems: written beside our own from the same diff, and read into a run of our own. docs/PEERS.md
gives their bytes."""
