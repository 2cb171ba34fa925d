"""Run this package in trainers of others, one module each; each imports its trainer."""
