"""The steps of a flow, a file each: thin Prefect tasks over what `storage` does, with their retries on the decorator.
Tensors never pass through Prefect: a step gets a handle."""
