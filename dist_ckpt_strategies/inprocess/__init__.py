"""Restart a block of training in place: healthy processes stay alive when one rank fails."""
