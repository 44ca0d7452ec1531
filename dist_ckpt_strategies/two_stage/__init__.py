"""Loads by a group of ranks in which each region of an array leaves storage once."""
