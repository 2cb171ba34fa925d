"""Graph passes that estimate and search."""
