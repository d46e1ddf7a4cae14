"""``python -m ckptfused``."""

from ckptfused.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
