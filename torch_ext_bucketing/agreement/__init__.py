"""All ranks must launch the same collectives: comparing what they compiled."""
