"""`python -m selfspec_tune`, the same as `selfspec`; what `accelerate launch -m` runs."""

from selfspec_tune.cli import main

if __name__ == "__main__":
    main()
