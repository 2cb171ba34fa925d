"""Compare the graphs of a process group's ranks before they run."""
