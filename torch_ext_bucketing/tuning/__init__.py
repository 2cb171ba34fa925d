"""Try several plans in the first steps of a training, and keep the fastest."""
