"""The demo: a small language model that is really trained, so that real weight changes cross the bridge.

Nothing in weighbridge depends on it; it uses weighbridge as any trainer would. Importing this package loads no torch.
"""
