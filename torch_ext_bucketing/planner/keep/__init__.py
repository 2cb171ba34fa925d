"""Choose what stays in memory from forward to backward."""
