"""`python -m weighbridge`: the command line."""

from weighbridge.cli import main

if __name__ == "__main__":
    main()
