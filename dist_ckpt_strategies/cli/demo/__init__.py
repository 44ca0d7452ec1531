"""The demo: a real GPT trained on CPU ranks, saved, and resumed in other layouts."""
