"""`python -m remat` is the command line."""

from remat.cli import main

if __name__ == "__main__":
    main()
