"""``python -m persample``, which ``torchrun -m persample`` starts on every process."""

from persample.cli import main

main()
