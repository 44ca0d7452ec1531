"""The ``dist-ckpt`` command; the only part that prints."""
