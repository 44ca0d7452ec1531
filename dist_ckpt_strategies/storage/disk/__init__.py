"""Files of a disk: durable writes, reads past the page cache, flushes, locks."""
