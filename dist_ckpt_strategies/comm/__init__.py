"""Communication between ranks: collectives with an error check, groups, abort."""
