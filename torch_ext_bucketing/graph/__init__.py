"""Reading a graph: facts about nodes, dependencies, writes, memory. Changes nothing."""
