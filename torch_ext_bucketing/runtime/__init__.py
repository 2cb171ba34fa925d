"""Let ranks meet, and compare their graphs before they run."""
