"""`python -m mar_grpo` is `mar-grpo`."""

from mar_grpo.cli import main

main()
