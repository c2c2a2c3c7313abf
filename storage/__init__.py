"""What is kept: stores, codecs, manifests, checkpoints, the host's replica, the history. Knows neither Prefect nor
torch.distributed; its callers pass in the clock, the local disk and the store."""
