"""A training's checkpoints: when to save, where, what to keep, what to load. Read manager.py first.

``policy`` has the options, ``tiers`` the two kinds of disks behind one interface, ``latest`` the
search over both, ``root`` what one rank does in the root directory, ``poll`` what ranks ask each
other after a step.
"""
