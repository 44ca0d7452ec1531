"""``python -m dist_ckpt_strategies.cli``: the command, where the script is not on the path."""

from dist_ckpt_strategies.cli.app import main

main()
