"""What conversions read from and write to, and how far they have come."""
