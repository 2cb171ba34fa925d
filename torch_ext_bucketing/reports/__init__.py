"""What a compile did to its collectives: data, and how it is printed."""
