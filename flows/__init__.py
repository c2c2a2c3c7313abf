"""What runs: publish, rollout, a host's part of it, and the host's worker. Flows name steps; tasks do them."""
