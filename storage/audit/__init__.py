"""The audit: everything that a store holds, read and proven against each other. Only reads."""
