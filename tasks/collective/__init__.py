"""The direct way of a committed version's shards, from the ranks that encoded them to the hosts: a broadcast over a
process group of its own. docs/TRANSPORT.md has the protocol. The store's commit stays the truth, and the way back."""
