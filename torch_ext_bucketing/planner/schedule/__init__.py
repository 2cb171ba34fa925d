"""Order the nodes of a graph under bounds on memory."""
