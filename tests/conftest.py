"""Events go where the package sends them in every test, whatever other tests of the process did to structlog before:
`structlog.testing.capture_logs` leaves it set up with its own defaults, which print to standard output."""

from weighbridge import logs

logs.configure()
