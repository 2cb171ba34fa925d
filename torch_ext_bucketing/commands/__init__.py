"""The commands' options. A command imports its work when it runs."""
