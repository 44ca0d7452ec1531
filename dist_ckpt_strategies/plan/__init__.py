"""Decisions: pure functions from facts to frozen plans. Equal facts give an equal plan."""
