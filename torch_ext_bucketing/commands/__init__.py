"""The options of commands; each imports what it does when it runs."""
