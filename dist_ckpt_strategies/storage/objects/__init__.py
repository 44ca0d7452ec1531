"""Objects in ``.pt`` files: read under an allow-list, found by name, checked without reading."""
