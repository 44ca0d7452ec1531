"""Deeds: carry out one plan. Storage and peers in, a report out."""
