"""Choose the values that stay in memory from forward to backward."""
