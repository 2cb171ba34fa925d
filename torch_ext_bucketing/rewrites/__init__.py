"""Rewrites of the tagged joint graph that change how often, and in which order, ranks reduce."""
