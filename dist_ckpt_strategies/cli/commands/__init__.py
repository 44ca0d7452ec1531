"""The arguments and help of each command; what it does is in the module of its name above."""
