"""The history of a run: what was published and what came of it, in Parquet segments that a compactor makes from
manifests and hosts' records, and in those themselves where they are newer. Nothing here decides anything, and all of it
can be made anew.
"""
