"""Search byte caps on a model of the merged graph."""
