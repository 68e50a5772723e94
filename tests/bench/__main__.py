"""`python tests/bench`: the same as `python tests/bench/run.py`."""

from run import main

if __name__ == "__main__":
    main()
